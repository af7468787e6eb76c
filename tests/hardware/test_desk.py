"""Readings belong to one monitor at a time."""

import fcntl
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertflow.hardware.desk import wait_for_others


def test_a_monitor_waits_for_the_one_of_a_training_that_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    readings = tmp_path / "state" / "gpu.jsonl"
    readings.parent.mkdir()
    n_looks = 0
    with readings.open("w") as other, ExitStack() as held:
        fcntl.flock(other, fcntl.LOCK_EX)

        def other_ends_later() -> bool:
            nonlocal n_looks
            n_looks += 1
            if n_looks == 3:
                fcntl.flock(other, fcntl.LOCK_UN)
            return False

        wait_for_others(held, readings, other_ends_later)
        assert n_looks == 3
        assert [r.getMessage() for r in caplog.records] == [
            f"{readings}: waiting for another monitor, which still writes there"
        ]
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with readings.open() as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_told_to_stop_it_waits_no_longer_and_takes_nothing(tmp_path: Path) -> None:
    readings = tmp_path / "gpu.jsonl"
    with readings.open("w") as other, ExitStack() as held:
        other.write("a reading\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another monitor still writes there"):
            wait_for_others(held, readings, lambda: True)
    assert readings.read_text() == "a reading\n"
