"""One trainer at a time; the next waits for one on this machine, and not for ever elsewhere."""

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
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.core.errors import TrainingError
from expertflow.train.saved import state_dirs
from expertflow.train.saved.state_dirs import locked

HOLD = """
import sys, time
from pathlib import Path
from expertflow.train.saved.state_dirs import locked
with locked(Path(sys.argv[1])):
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
    with locked(tmp_path, elsewhere_s=0):
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
    with caplog.at_level(logging.WARNING), locked(tmp_path, elsewhere_s=0):
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
            with locked(tmp_path, elsewhere_s=1.0):
                raise AssertionError("it is held")
    place = "process 7 on elsewhere" if "host" in signed else "process unknown on an unknown"
    assert place in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / "lock").read_text() == signed


def test_where_there_are_no_locks_a_trainer_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), locked(tmp_path):
        assert "pid" in json.loads((tmp_path / "lock").read_text())
    assert "this file system has no locks" in caplog.text
