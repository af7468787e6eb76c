"""One trainer at a time per state, and which states may be removed."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from expertflow.core import locks
from expertflow.core.errors import TrainingError
from expertflow.train.saved.checkpoint_files import find_abandoned, lock_state, prunable_states


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of sleeps; no other time passes."""
    taken: list[float] = []
    clock = SimpleNamespace(sleep=taken.append, monotonic=lambda: sum(taken))
    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr(locks, "POLL_S", 20.0)
    return taken


def held(state: Path, signed: str) -> IO[str]:
    """Hold the lock of a state like another process."""
    (state / "lock").write_text(signed)
    stream = (state / "lock").open()
    fcntl.flock(stream, fcntl.LOCK_EX)
    return stream


def test_a_trainer_on_this_machine_is_awaited(
    tmp_path: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, str]] = []
    with held(tmp_path, json.dumps({"host": socket.gethostname(), "pid": 7})) as stream:

        def tell(message: str, *words: object) -> None:
            told.append((sum(naps), message % words))
            if len(told) == 2:
                fcntl.flock(stream, fcntl.LOCK_UN)

        monkeypatch.setattr(locks.log, "warning", tell)
        with lock_state(tmp_path, elsewhere_s=0):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    message = "a trainer is running there, process 7; waiting for it; Ctrl-C ends the wait"
    assert told == [(at_s, f"{tmp_path}: {message}") for at_s in (0.0, 60.0)]


def test_others_are_rejected(tmp_path: Path, naps: list[float]) -> None:
    for signed, place in (
        ('{"host": "elsewhere", "pid": 7}', "process 7 on elsewhere, for 600 s now"),
        (json.dumps({"host": socket.gethostname(), "pid": 7}), "process 7, for 24 h now"),
        ("", "process unknown on an unknown machine"),
        ("cut sh", "process unknown on an unknown machine"),
    ):
        naps.clear()
        refused = pytest.raises(TrainingError, match=f"{place}.*; stop it, which saves its state")
        with held(tmp_path, signed), refused as caught, lock_state(tmp_path):
            raise AssertionError("it is held")
        assert "\n" not in str(caught.value) and sum(naps) in (600.0, 24 * 3600.0)
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


def test_published_running_and_resumable_states_are_kept(tmp_path: Path) -> None:
    state(tmp_path, "published", finished=True, age=50)
    old = state(tmp_path, "old", finished=True, age=40)
    abandoned = state(tmp_path, "abandoned", finished=False, age=30)
    state(tmp_path, "resumable", finished=False, age=20)
    running = state(tmp_path, "running", finished=True, age=10)
    (tmp_path / "results" / "e").mkdir(parents=True)
    (tmp_path / "results/e/training.json").write_text('{"fingerprint": "published"}')
    (tmp_path / "state" / "hashes.json").write_text("{}")
    (tmp_path / "state" / ".tokens" / "abc").mkdir(parents=True)
    with held(running, "{}"):
        assert set(prunable(tmp_path)) == {old, abandoned}


def test_the_last_model_is_kept_if_a_retraining_failed(tmp_path: Path) -> None:
    older = {state(tmp_path, f"of-{age}", finished=True, age=age) for age in (40, 50)}
    state(tmp_path, "last", finished=True, age=30)
    state(tmp_path, "failed", finished=False, age=10)
    assert set(prunable(tmp_path)) == older


def test_what_killed_jobs_left_is_found_outside_of_running_trainings(tmp_path: Path) -> None:
    idle, busy = (state(tmp_path, name, finished=False, age=1) for name in ("idle", "busy"))
    for folder in (idle, busy, tmp_path):
        (folder / ".rows.123.partial" / ".in.123.partial").mkdir(parents=True)
        for path in (
            folder / ".rows.123.partial" / ".in.123.partial",
            folder / ".rows.123.partial",
        ):
            os.utime(path, (0, 0))
    with held(busy, "{}"):
        found = find_abandoned(tmp_path / "state", tmp_path / "results")
        assert found == [idle / ".rows.123.partial"]
    assert len(find_abandoned(tmp_path)) == 3


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell which states are in use."""
    for age in (30, 40):
        state(tmp_path, f"age-{age}", finished=True, age=age)
    assert prunable(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not prunable(tmp_path)
    with lock_state(tmp_path / "a" / "new"):
        assert json.loads((tmp_path / "a/new/lock").read_text())["pid"] == os.getpid()
