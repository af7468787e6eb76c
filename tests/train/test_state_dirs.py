"""One trainer at a time in a state, and which states may be removed."""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.core.errors import TrainingError
from expertflow.train.saved import state_dirs
from expertflow.train.saved.state_dirs import lock_state, prunable_states

HOLD = """
import sys, time
from pathlib import Path
from expertflow.train.saved.state_dirs import lock_state
with lock_state(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(state: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid
    with lock_state(tmp_path, elsewhere_s=0):
        assert json.loads((tmp_path / "lock").read_text())["pid"] != process.pid


def test_one_on_this_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = holder(tmp_path)
    monkeypatch.setattr(state_dirs, "TOLD_EVERY_S", 0.0)

    def kill() -> None:
        deadline = time.monotonic() + 60
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with caplog.at_level(logging.WARNING), lock_state(tmp_path, elsewhere_s=0):
        assert process.wait(60) == -signal.SIGKILL
    killer.join()
    assert len(caplog.records) > 1, "it is told again and again"
    assert f"a trainer is at work there, process {process.pid}; waiting" in caplog.text


@pytest.mark.parametrize("signed", ['{"host": "elsewhere", "pid": 7}', "", "cut sh"])
def test_one_elsewhere_is_waited_for_so_long_and_then_refused(tmp_path: Path, signed: str) -> None:
    (tmp_path / "lock").write_text(signed)
    with (tmp_path / "lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match="stop it, and run again") as caught:
            with lock_state(tmp_path, elsewhere_s=1.0):
                raise AssertionError("it is held")
    place = "process 7 on elsewhere" if "host" in signed else "process unknown on an unknown"
    assert place in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / "lock").read_text() == signed


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    return lambda: monkeypatch.setattr(fcntl, "flock", refuse)


def test_where_there_are_no_locks_a_trainer_goes_on_and_says_so(
    tmp_path: Path, without_locks: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    without_locks()
    with caplog.at_level(logging.WARNING), lock_state(tmp_path):
        assert "pid" in json.loads((tmp_path / "lock").read_text())
    assert "this file system has no locks" in caplog.text


def state(root: Path, name: str, *, finished: bool, age: int) -> Path:
    path = root / "state" / "e" / name
    path.mkdir(parents=True)
    (path / "lock").touch()
    if finished:
        (path / "outcome.json").write_text("{}")
    os.utime(path, (1000 - age, 1000 - age))
    return path


def test_published_running_and_resumable_states_stay(tmp_path: Path) -> None:
    published = state(tmp_path, "published", finished=True, age=50)
    old = state(tmp_path, "old", finished=True, age=40)
    abandoned = state(tmp_path, "abandoned", finished=False, age=30)
    resumable = state(tmp_path, "resumable", finished=False, age=20)
    running = state(tmp_path, "running", finished=True, age=10)
    (tmp_path / "results" / "e").mkdir(parents=True)
    (tmp_path / "results" / "e" / "training.json").write_text(
        json.dumps({"fingerprint": "published"})
    )
    (tmp_path / "state" / "hashes.json").write_text("{}")
    (tmp_path / "state" / ".tokens" / "abc").mkdir(parents=True)
    with (running / "lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert set(prunable_states(tmp_path / "results", tmp_path / "state")) == {old, abandoned}
    assert published.is_dir() and resumable.is_dir()


def test_the_last_model_stays_when_a_retraining_failed(tmp_path: Path) -> None:
    older = state(tmp_path, "older", finished=True, age=40)
    state(tmp_path, "last", finished=True, age=30)
    state(tmp_path, "failed", finished=False, age=10)
    assert prunable_states(tmp_path / "results", tmp_path / "state") == [older]


def test_nothing_is_removed_where_nobody_can_tell_what_is_in_use(
    tmp_path: Path, without_locks: Callable[[], None]
) -> None:
    for age in (30, 40):
        state(tmp_path, f"age-{age}", finished=True, age=age)
    assert prunable_states(tmp_path / "results", tmp_path / "state")
    without_locks()
    assert not prunable_states(tmp_path / "results", tmp_path / "state")
