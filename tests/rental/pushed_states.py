"""Training states as they are pushed, and stores that break."""

import json
from pathlib import Path

import pytest

from expertflow.rental.sync.states import push_state
from expertflow.rental.sync.store import Store, SyncFailed
from expertflow.train.saved import checkpoint_files

KEY = "state/sums/abc"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Give a state with logs and no checkpoint yet."""
    path = tmp_path / "here" / "sums" / "abc"
    (path / "checkpoints").mkdir(parents=True)
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
    ours = checkpoint_files.fingerprints(folder, names)
    progress = {"step": step, "held_out_loss": held_out_loss, checkpoint_files.OURS: ours}
    (folder / checkpoint_files.PROGRESS).write_text(json.dumps(progress))
    with (state / "steps.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step}) + "\n")
    checkpoint_files.prune(state, keep=1)


def finish(state: Path) -> None:
    (state / "final").mkdir()
    (state / "final" / "model.safetensors").write_text("weights")
    (state / "outcome.json").write_text("{}")


def push(state: Path, store: Store) -> object:
    return push_state(state, store, state.parents[1] / ".guard" / "hold")


class Failing:
    """A store that breaks when a manifest is due."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def send(self, folder: Path, key: str, names: list[str]) -> object:
        if names[0].endswith(".json") and len(names) == 1:
            raise SyncFailed("the line is dead")
        return self._store.send(folder, key, names)


class Flaky:
    """A store whose line breaks when files are fetched, a number of times."""

    def __init__(self, store: Store, n_failures: int) -> None:
        self._store, self.n_left = store, n_failures

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def fetch(self, key: str, folder: Path) -> None:
        if self.n_left:
            self.n_left -= 1
            raise SyncFailed("the line is dead")
        self._store.fetch(key, folder)
