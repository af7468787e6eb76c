"""A lock is taken, held by another one, or not to be had on this file system."""

import errno
import fcntl
import logging
from pathlib import Path
from typing import Any

import pytest

from expertflow.core.locks import NO_LOCKS, read_holder, sign_lock, try_lock


def test_one_at_a_time_holds_it_and_says_who(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a+", encoding="utf-8") as one, path.open("a+", encoding="utf-8") as two:
        assert try_lock(one, wait=True) == "taken"
        assert read_holder(two) == {}
        sign_lock(one, slurm_runs=[])
        assert try_lock(two) == "held"
        assert read_holder(two).keys() == {"slurm_runs", "host", "pid"}
        one.close()
        assert try_lock(two) == "taken"


@pytest.mark.parametrize("number", [*NO_LOCKS, errno.EIO])
def test_a_file_system_without_locks_is_told_and_other_errors_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no luck")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as stream, caplog.at_level(logging.WARNING):
        if number == errno.EIO:
            with pytest.raises(OSError, match="no luck"):
                try_lock(stream)
        else:
            assert try_lock(stream) == "no locks"
            assert f"{tmp_path / 'lock'}: this file system has no locks" in caplog.text
