"""One trainer at a time in a state, and which states may be removed."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.core.errors import TrainingError
from expertflow.train.saved import state_dirs
from expertflow.train.saved.state_dirs import lock_state, prunable_states

HOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from expertflow.train.saved.state_dirs import lock_state
with lock_state(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    ) as process:  # fmt: skip
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def holder_of(state: Path) -> int:
    pid: int = json.loads((state / "lock").read_text())["pid"]
    return pid


def test_a_lock_dies_with_its_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert holder_of(tmp_path) == holder.pid
    with lock_state(tmp_path, elsewhere_s=0):
        assert holder_of(tmp_path) == os.getpid()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the naps that are taken; no other time passes."""
    taken: list[float] = []
    clock = SimpleNamespace(sleep=taken.append, monotonic=lambda: sum(taken))
    monkeypatch.setattr(state_dirs, "time", clock)
    return taken


def test_one_on_this_machine_is_waited_for(
    tmp_path: Path, holder: subprocess.Popen[str], naps: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    told: list[tuple[float, str]] = []

    def tell(_: str, *words: object) -> None:
        told.append((sum(naps), str(words[0])))
        if len(told) == 2:
            holder.kill()
            holder.wait()

    monkeypatch.setattr(state_dirs.log, "warning", tell)
    with lock_state(tmp_path, elsewhere_s=0):
        assert holder.returncode == -signal.SIGKILL
    said = f"{tmp_path}: a trainer is at work there, process {holder.pid}"
    assert told == [(0.0, said), (60.0, said)]


@pytest.mark.parametrize(
    ("signed", "place"),
    [
        ('{"host": "elsewhere", "pid": 7}', "process 7 on elsewhere, for 600 s now"),
        ("", "process unknown on an unknown machine"),
        ("cut sh", "process unknown on an unknown machine"),
    ],
)
def test_one_elsewhere_is_waited_for_so_long_and_then_refused(
    tmp_path: Path, naps: list[float], signed: str, place: str
) -> None:
    (tmp_path / "lock").write_text(signed)
    with (tmp_path / "lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match=f"{place}.*; stop it, and run again") as caught:
            with lock_state(tmp_path):
                raise AssertionError("it is held")
    assert "\n" not in str(caught.value) and sum(naps) == 600
    assert (tmp_path / "lock").read_text() == signed


def state(root: Path, name: str, *, finished: bool, age: int) -> Path:
    path = root / "state" / "e" / name
    path.mkdir(parents=True)
    (path / "lock").touch()
    if finished:
        (path / "outcome.json").write_text("{}")
    os.utime(path, (1000 - age, 1000 - age))
    return path


def prunable(root: Path) -> list[Path]:
    return prunable_states(root / "results", root / "state")


def test_published_running_and_resumable_states_stay(tmp_path: Path) -> None:
    state(tmp_path, "published", finished=True, age=50)
    old = state(tmp_path, "old", finished=True, age=40)
    abandoned = state(tmp_path, "abandoned", finished=False, age=30)
    state(tmp_path, "resumable", finished=False, age=20)
    running = state(tmp_path, "running", finished=True, age=10)
    (tmp_path / "results" / "e").mkdir(parents=True)
    (tmp_path / "results/e/training.json").write_text('{"fingerprint": "published"}')
    (tmp_path / "state" / "hashes.json").write_text("{}")
    (tmp_path / "state" / ".tokens" / "abc").mkdir(parents=True)
    with (running / "lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert set(prunable(tmp_path)) == {old, abandoned}


def test_the_last_model_stays_when_a_retraining_failed(tmp_path: Path) -> None:
    older = state(tmp_path, "older", finished=True, age=40)
    state(tmp_path, "last", finished=True, age=30)
    state(tmp_path, "failed", finished=False, age=10)
    assert prunable(tmp_path) == [older]


def test_where_there_are_no_locks_a_trainer_goes_on_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell what is in use."""
    for age in (30, 40):
        state(tmp_path, f"age-{age}", finished=True, age=age)
    assert prunable(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not prunable(tmp_path)
    with lock_state(tmp_path):
        assert holder_of(tmp_path) == os.getpid()
