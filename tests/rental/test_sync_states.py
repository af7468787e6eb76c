"""A state pushed during training comes back complete, or the previous push does.

A broken connection is not damage, and a more advanced local state stays.
"""

import errno
import fcntl
import json
import logging
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from stores import Place, every_kind, every_store

from expertflow.core.files import sha256_directory
from expertflow.rental.sync import states
from expertflow.rental.sync.states import pull_states, push_state
from expertflow.rental.sync.store import Store, SyncFailed, files_below
from expertflow.train.saved import checkpoint_files

KEY = "state/sums/abc"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "here" / "sums" / "abc"
    # There are also folders that are not states.
    for name in (".guard/x", "sums/.abc.7.partial", "sums/abc/checkpoints"):
        (tmp_path / "here" / name).mkdir(parents=True)
    for name in ("steps.jsonl", "plan.json", "lock", ".steps.jsonl.7.partial"):
        (path / name).write_text("{}\n")
    return path


def save(state: Path, step: int, *, held_out_loss: float | None = None) -> None:
    """Write a checkpoint as the trainer does; keep the newest one and the best."""
    folder = state / "checkpoints" / f"step-{step:08d}"
    folder.mkdir()
    names = (checkpoint_files.WEIGHTS, checkpoint_files.OPTIMIZER)
    for name in names:
        (folder / name).write_text(f"{name} after step {step}")
    ours = checkpoint_files.hash_contents(folder, names)
    progress = {"step": step, "held_out_loss": held_out_loss, checkpoint_files.OURS: ours}
    (folder / checkpoint_files.PROGRESS).write_text(json.dumps(progress))
    with (state / "steps.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step}) + "\n")
    checkpoint_files.prune_checkpoints(state, keep=1)


def push(state: Path, store: Store) -> object:
    return push_state(state, store, state.parents[1] / ".guard" / "hold")


def pull(root: Path, store: Store) -> str:
    (message,) = pull_states(root, store)
    return message


def push_steps(state: Path, place: Place, *steps: int) -> Store:
    """Save and push after some steps, as in a run."""
    store = place.open()
    for step in steps:
        save(state, step)
        push(state, store)
    return store


class Broken:
    """A store whose connection breaks on sending manifests and on fetching this many files."""

    def __init__(self, store: Store, n_failures: int = 0) -> None:
        self._store, self.n_left = store, n_failures

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def send_files(self, folder: Path, key: str, names: list[str]) -> object:
        if names[0].endswith(".json") and len(names) == 1:
            raise SyncFailed("the line is dead")
        return self._store.send_files(folder, key, names)

    def fetch(self, key: str, folder: Path) -> None:
        if self.n_left:
            self.n_left -= 1
            raise SyncFailed("the line is dead")
        self._store.fetch(key, folder)


@every_kind
def test_a_pushed_state_comes_back_complete(place: Place, state: Path, tmp_path: Path) -> None:
    store = place.open()
    save(state, 20, held_out_loss=1.0)
    save(state, 40, held_out_loss=2.0)
    assert push(state, store) is not None
    message = "sums/abc: step-00000040 pulled, sha256 of every file matches"
    assert pull(tmp_path / "fresh", place.open()) == message
    back = tmp_path / "fresh" / "sums" / "abc"
    # The newest checkpoint, the best one and the logs; no lock, nothing half-written.
    assert files_below(back) == [name for name in files_below(state) if name != "lock"]
    assert checkpoint_files.best_checkpoint(back) == back / "checkpoints" / "step-00000020"
    checkpoints = [path / "checkpoints" for path in (state, back)]
    assert sha256_directory(checkpoints[0]) == sha256_directory(checkpoints[1])
    assert not list((tmp_path / "here" / ".guard" / "hold").rglob("*.safetensors"))
    # Nothing more to pull.
    assert pull_states(tmp_path / "fresh", place.open()) == []


@every_store
def test_files_that_are_not_pushes_stay(place: Place, state: Path, tmp_path: Path) -> None:
    """As if the destination were a checkout that trains the same expert."""
    assert place.folder is not None
    there = place.folder / KEY
    shutil.copytree(state, there)
    save(there, 80)
    n_files = len(files_below(there))
    assert pull_states(tmp_path / "fresh", place.open()) == []
    push_steps(state, place, 20, 40, 60)
    assert "step-00000060 pulled" in pull(tmp_path / "fresh", place.open())
    remaining = [name for name in files_below(there) if not name.startswith("step-")]
    assert len(remaining) == n_files


@every_store
def test_two_pushes_are_kept_or_the_finished_state(
    place: Place, state: Path, tmp_path: Path
) -> None:
    store = place.open()
    for step in (20, 40, 60):
        save(state, step)
        push(state, store)
        assert push(state, store) is None
    names = ["step-00000040", "step-00000040.json", "step-00000060", "step-00000060.json"]
    # An emptied folder is not a push; only rsync leaves one.
    assert [n for n in store.list_names(KEY) if n != "step-00000020"] == names
    pull_states(tmp_path / "fresh", store)
    (state / "final").mkdir()
    (state / "final" / "model.safetensors").write_text("weights")
    (state / "outcome.json").write_text("{}")
    push(state, store)
    left = store.list_names(KEY)
    assert "finished.json" in left and "step-00000040.json" not in left
    assert "finished pulled" in pull(tmp_path / "fresh", store)
    back = tmp_path / "fresh" / "sums" / "abc"
    assert (back / "final" / "model.safetensors").read_text() == "weights"
    assert not (back / "checkpoints").exists()


def test_a_damaged_push_is_replaced(place: Place, state: Path, tmp_path: Path) -> None:
    store = push_steps(state, place, 20, 40)
    file = f"{KEY}/step-00000040/checkpoints/step-00000040/{checkpoint_files.WEIGHTS}"
    place.write(file, place.read(file)[:-1] + b"x")
    waits: list[float] = []
    (message,) = pull_states(tmp_path / "fresh", store, wait=waits.append)
    # Fetching damaged files again would not fix them.
    assert "step-00000020 pulled" in message and waits == []
    newest = checkpoint_files.newest_checkpoint(tmp_path / "fresh" / "sums" / "abc")
    assert newest is not None and newest.name == "step-00000020"
    # Known to be damaged, it no longer counts as a push of that step.
    push(state, store)
    assert "step-00000040 pulled" in pull(tmp_path / "again", store)


def test_an_incomplete_push_keeps_the_older_one(place: Place, state: Path, tmp_path: Path) -> None:
    store = push_steps(state, place, 20)
    save(state, 40)
    with pytest.raises(SyncFailed, match="the line is dead"):
        push(state, Broken(store))  # type: ignore[arg-type]
    assert not (tmp_path / "here" / ".guard" / "hold" / "files").exists()
    assert "step-00000020 pulled" in pull(tmp_path / "fresh", store)
    # Its files are reused or removed by the next one.
    save(state, 60)
    push(state, store)
    assert "step-00000040.json" not in store.list_names(KEY)
    assert "step-00000060 pulled" in pull(tmp_path / "newer", store)


def test_pruning_is_harmless(place: Place, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state, 20)
    link, went = states.link_or_copy, []

    def prune_first(source: Path, target: Path) -> None:
        if not went:
            went.append(source)
            save(state, 40)
        link(source, target)

    monkeypatch.setattr(states, "link_or_copy", prune_first)
    store = place.open()
    push(state, store)
    assert store.list_names(KEY) == ["step-00000040", "step-00000040.json"]


def test_a_push_whose_copy_disappeared_does_not_count(
    place: Place, state: Path, tmp_path: Path
) -> None:
    store = push_steps(state, place, 20)
    save(state, 40)

    class Emptying(Broken):
        def send_files(self, folder: Path, key: str, names: list[str]) -> object:
            sent = store.send_files(folder, key, names)
            shutil.rmtree(folder, ignore_errors=not names[0].endswith(".json"))
            return sent

    with pytest.raises(FileNotFoundError):
        push(state, Emptying(store))  # type: ignore[arg-type]
    assert "step-00000040.json" not in store.list_names(KEY)
    assert "step-00000020.json" in store.list_names(KEY)


def test_an_unverified_push_is_verified(place: Place, state: Path, tmp_path: Path) -> None:
    store, hold = push_steps(state, place, 20), tmp_path / "hold"
    file = f"{KEY}/step-00000020/checkpoints/step-00000020/{checkpoint_files.WEIGHTS}"
    good = place.read(file)
    place.write(file, bytes(len(good)))
    assert push_state(state, store, hold) is None
    sent = push_state(state, store, hold, trusted=())
    assert place.read(file) == good
    # A speed computed from the transferred bytes would reserve weeks for a last copy.
    files = [state / name for name in files_below(state) if name != "lock"]
    assert sent is not None and sent.n_bytes == sum(path.stat().st_size for path in files)


def test_a_state_in_use_is_left_alone(place: Place, state: Path, tmp_path: Path) -> None:
    store = push_steps(state, place, 20)
    busy = tmp_path / "fresh" / "sums" / "abc"
    busy.mkdir(parents=True)
    with (busy / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        (message,) = pull_states(tmp_path / "fresh", store)
    assert message.endswith("a trainer is running here")
    assert files_below(busy) == ["lock"]


@pytest.mark.parametrize("name", [b"../steps.jsonl", None])
def test_a_store_cannot_write_outside_the_state(
    place: Place, state: Path, tmp_path: Path, name: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = push_steps(state, place, 20)
    text = place.read(f"{KEY}/step-00000020.json")
    bad = b"{" if name is None else text.replace(b"steps.jsonl", name)
    place.write(f"{KEY}/step-00000020.json", bad)
    with caplog.at_level(logging.WARNING), pytest.raises(SyncFailed, match=r"damaged.*--no-pull"):
        pull_states(tmp_path / "fresh", store)
    assert ("not a JSON record" if name is None else "not a path inside a folder") in caplog.text
    assert not (tmp_path / "fresh" / "sums" / "abc").exists()


def test_a_broken_connection_is_not_damage(
    place: Place, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fresh = push_steps(state, place, 20, 40), tmp_path / "fresh"
    waits: list[float] = []
    with pytest.raises(SyncFailed, match="the line is dead"):
        pull_states(fresh, Broken(store, 99), wait=waits.append)  # type: ignore[arg-type]
    assert waits == [5.0, 10.0, 20.0] and not (fresh / "sums" / "abc").exists()
    # A full disk stays full, and each try would fetch everything again.
    monkeypatch.setattr(shutil, "copystat", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(SyncFailed, match="full"):
        pull_states(fresh, store, wait=waits.append)
    assert len(waits) == 3
    monkeypatch.undo()
    (message,) = pull_states(fresh, Broken(store, 2), wait=waits.append)  # type: ignore[arg-type]
    assert "step-00000040 pulled" in message


def test_a_locally_damaged_checkpoint_is_restored(place: Place, state: Path) -> None:
    store = push_steps(state, place, 20)
    weights = state / "checkpoints" / "step-00000020" / checkpoint_files.WEIGHTS
    good = weights.read_bytes()
    weights.write_bytes(bytes(len(good)))
    assert "step-00000020 pulled" in pull(state.parents[1], store)
    assert weights.read_bytes() == good
    # A more advanced local state stays.
    save(state, 40)
    assert pull_states(state.parents[1], store) == []
    newest = checkpoint_files.newest_checkpoint(state)
    assert newest is not None and newest.name == "step-00000040"
