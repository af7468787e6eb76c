"""Waiting for a lock is told each minute, and ends."""

import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertflow.core import locks
from expertflow.core.errors import TransientError
from expertflow.core.locks import wait_for_lock


def test_a_lock_is_waited_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    naps: list[float] = []
    clock = SimpleNamespace(sleep=naps.append, monotonic=lambda: 6 * 3600.0 * len(naps))
    monkeypatch.setattr(locks, "time", clock)
    with (tmp_path / "lock").open("w") as held, (tmp_path / "lock").open("w") as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TransientError, match="another is at work, for 24 h now; end it"):
            wait_for_lock(wanted, "another is at work", shared=True)
        assert caplog.text.count("waiting for it; Ctrl-C ends the wait") == 4
        fcntl.flock(held, fcntl.LOCK_UN)
        wait_for_lock(wanted, "another is at work")
        assert len(naps) == 4
