import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from expertflow.core.files import remove
from expertflow.train.saved.state_dirs import prunable


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
        places = tmp_path / "results", tmp_path / "state"
        assert set(prunable(*places)) == {old, abandoned}
        for path in prunable(*places):
            remove(path)
    assert published.is_dir() and resumable.is_dir() and running.is_dir()
    assert not old.exists() and not abandoned.exists()


def test_the_last_model_stays_when_a_retraining_failed(tmp_path: Path) -> None:
    older = state(tmp_path, "older", finished=True, age=40)
    last = state(tmp_path, "last", finished=True, age=30)
    state(tmp_path, "failed", finished=False, age=10)
    for path in prunable(tmp_path / "results", tmp_path / "state"):
        remove(path)
    assert last.is_dir() and not older.exists()


def test_nothing_is_removed_where_nobody_can_tell_what_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    for age in (30, 40):
        state(tmp_path, f"age-{age}", finished=True, age=age)
    assert prunable(tmp_path / "results", tmp_path / "state")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not prunable(tmp_path / "results", tmp_path / "state")
