"""Lock training states, find their checkpoints, list what may be removed; needs no torch."""

import json
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from expertflow.core.files import PARTIAL, is_abandoned, read_json_lines, remove
from expertflow.core.locks import LIMIT_S, read_holder, sign_lock, try_lock, wait_for_lock
from expertflow.core.records import read_part, unseal
from expertflow.staging.store import hash_files

log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, PROGRESS = "weights.safetensors", "optimizer.safetensors", "progress.json"
TENSORS = (WEIGHTS, OPTIMIZER)
# Written last, when a training is finished.
OUTCOME = "outcome.json"
# The one key of progress.json that does not come from the run.
OURS = "checkpoint"
LOCK_FILE = "lock"
# A stopping trainer on another machine has a step and a checkpoint to finish.
ELSEWHERE_S = 600.0


class Contents(TypedDict):
    n_bytes: dict[str, int]
    xxh3: dict[str, str]


def hash_contents(directory: Path, names: Sequence[str]) -> Contents:
    return {
        "n_bytes": {name: (directory / name).stat().st_size for name in names},
        "xxh3": hash_files(directory, list(names)),
    }


def find_difference(directory: Path, wanted: Contents, *, contents: Iterable[str]) -> str | None:
    """Return how files differ from ``wanted``: in size, or in their bytes if in ``contents``."""
    for name, size in wanted["n_bytes"].items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} bytes, but was written with {size}"
    for name, digest in hash_files(directory, list(contents)).items():
        if digest != wanted["xxh3"][name]:
            return f"{name} does not match what was written"
    return None


def find_damage(directory: Path, *, contents: Iterable[str] = ()) -> str | None:
    """Return what is wrong with a checkpoint's files, if anything.

    A power cut may leave zero-filled files of the right size, which only ``contents`` finds.
    """
    try:
        wanted = read_progress(directory)[OURS]
        return find_difference(directory, wanted, contents=contents)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return f"{PROGRESS} cannot be read ({type(error).__name__}: {error})"


def directory_of(state: Path, step: int) -> Path:
    return state / "checkpoints" / f"step-{step:08d}"


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def complete_checkpoints(state: Path) -> list[Path]:
    damages = {path: find_damage(path) for path in sorted((state / "checkpoints").glob("step-*"))}
    for path, found in damages.items():
        if found is not None:
            log.warning("skipping %s: %s", path, found)
    return [path for path, found in damages.items() if found is None]


def newest_checkpoint(state: Path) -> Path | None:
    return next(reversed(complete_checkpoints(state)), None)


def newest_unfinished(states: Path) -> Path | None:
    """Return the newest checkpoint of an expert's unfinished trainings."""
    unfinished = (path for path in states.glob("[!.]*") if not (path / OUTCOME).is_file())
    found = filter(None, map(newest_checkpoint, unfinished))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def best_checkpoint(state: Path) -> Path | None:
    losses = {
        path: read_progress(path).get("held_out_loss") for path in complete_checkpoints(state)
    }
    # A NaN is unequal to itself, and would make min() depend on the order.
    known = {path: loss for path, loss in losses.items() if loss is not None and loss == loss}
    return min(known, key=known.__getitem__) if known else None


def read_progress(directory: Path) -> dict[str, Any]:
    progress: dict[str, Any] = unseal(json.loads((directory / PROGRESS).read_bytes()))
    return progress


def n_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def last_seen_s(state: Path) -> float:
    """Return the run's clock at the last checkpoint or sample of its last session."""
    times = [0.0]
    if saved := complete_checkpoints(state):
        times.append(read_progress(saved[-1])["clock"]["wall"])
    if (state / "gpu.jsonl").is_file():
        times += [sample["elapsed_s"] for sample in read_json_lines(state / "gpu.jsonl")]
    return max(times)


def prune_checkpoints(state: Path, keep: int) -> None:
    # The best one may be older than those that the limit keeps.
    kept = {*complete_checkpoints(state)[-max(1, keep) :], best_checkpoint(state)}
    for path in sorted((state / "checkpoints").glob("step-*")):
        if path not in kept:
            hide_checkpoint(path)
    for path in (state / "checkpoints").glob(".*.old.partial"):
        remove(path)


def hide_checkpoint(path: Path) -> None:
    """Rename a checkpoint, so that a kill during its removal does not leave half of it."""
    path.rename(path.with_name(f".{path.name}.{time.monotonic_ns()}.old.partial"))


def remove_partials(state: Path) -> None:
    """Remove leftovers of killed sessions and files damaged by a power cut; requires the lock.

    The newest and the best checkpoint are verified byte by byte, since a session relies on them.
    """
    whole: set[Path] = set()
    for choose in (newest_checkpoint, best_checkpoint):
        while (path := choose(state)) is not None and path not in whole:
            if (found := find_damage(path, contents=TENSORS)) is None:
                whole.add(path)
            else:
                log.warning("removing %s: %s", path, found)
                hide_checkpoint(path)
    for folder in (state, state / "checkpoints", state / "profile"):
        for path in folder.glob(".*.partial"):
            remove(path)


@contextmanager
def lock_state(state: Path, *, elsewhere_s: float = ELSEWHERE_S) -> Iterator[None]:
    """Lock the state directory for one trainer; the lock dies with its process.

    A killed Snakemake leaves its trainer running. Wait for one on this machine, since its results
    are worth more than a refusal; for one elsewhere only ``elsewhere_s``, as it may be cut off.
    Raises TransientError if it is still held after a day.
    """
    state.mkdir(parents=True, exist_ok=True)
    # Not "w", which would erase what its holder wrote.
    with (state / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        if try_lock(stream) == "held":
            known, limit_s = read_holder(stream), LIMIT_S
            who = f"{state}: a trainer is running there, process {known.get('pid', 'unknown')}"
            if known.get("host") != socket.gethostname():
                who += f" on {known.get('host', 'an unknown machine')}"
                limit_s = elsewhere_s
            wait_for_lock(
                stream,
                who,
                limit_s=limit_s,
                fix="stop it, which saves its state, and run again to resume from there",
            )
        sign_lock(stream)
        yield


def prunable_states(results: Path, state: Path) -> list[Path]:
    """List removable states: not published by their expert, and not in use.

    An unfinished state may be resumed, so the newest one stays.
    """
    found: list[Path] = []
    # The token store and a guard's notes next to the states have other rules.
    experts = (path for path in state.glob("[!.]*") if path.is_dir())
    for expert in sorted(experts):
        record = results / expert.name / "training.json"
        published = read_part(str, record, "fingerprint") if record.is_file() else None
        others = [path for path in expert.iterdir() if path.is_dir() and path.name != published]
        others.sort(key=lambda path: path.stat().st_mtime)
        finished = [path for path in others if (path / OUTCOME).is_file()]
        unfinished = [path for path in others if path not in finished]
        # Nothing published: a retraining failed, and the newest finished model is the last one.
        keep = unfinished[-1:] + ([] if published else finished[-1:])
        found += [path for path in others if path not in keep and not _in_use(path)]
    return found


def find_abandoned(*folders: Path) -> list[Path]:
    """List what killed jobs left half-written, except what a running trainer will remove."""
    found: list[Path] = []
    for path in sorted(path for folder in folders for path in folder.rglob(f".*{PARTIAL}")):
        states = (parent for parent in path.parents if (parent / LOCK_FILE).is_file())
        is_inside = any(path.is_relative_to(other) for other in found)
        if not is_inside and is_abandoned(path) and not any(map(_in_use, states)):
            found.append(path)
    return found


def _in_use(state: Path) -> bool:
    with (state / LOCK_FILE).open("a") as stream:
        return try_lock(stream) != "taken"
