"""A lock is taken, held by another one, or not to be had on this file system."""

import errno
import fcntl
import logging
from pathlib import Path
from typing import Any

import pytest

from expertflow.core.locks import NO_LOCKS, try_lock


def test_one_holds_it_and_several_may_share_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as one, path.open("a") as two, path.open("a") as three:
        assert try_lock(one, shared=True) == try_lock(two, shared=True, wait=True) == "taken"
        assert try_lock(three) == "held"
        one.close()
        two.close()
        assert try_lock(three) == "taken"
        with path.open("a") as four:
            assert try_lock(four, shared=True) == "held"


@pytest.mark.parametrize("number", NO_LOCKS)
def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as stream, caplog.at_level(logging.WARNING):
        assert try_lock(stream) == "no locks"
    assert f"{tmp_path / 'lock'}: this file system has no locks" in caplog.text


def test_other_errors_stay_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as stream, pytest.raises(OSError, match="input/output"):
        try_lock(stream)
