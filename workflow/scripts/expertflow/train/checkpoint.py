"""Save and restore the whole state of a run: trained weights, optimiser, random numbers, progress.

A checkpoint is a directory that appears by one rename, after everything in it was flushed, so a
half-written one is never seen. It holds tensors and JSON, nothing that could run. Everything in it
is whole and by name, so what some processes saved, any number of them can resume. The state of the
data order needs no saving: batches are a function of the step.
"""

import fcntl
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from expertflow.core.errors import HardwareError, TrainingError
from expertflow.core.files import read_json_lines, remove, replacing, sync_directory
from expertflow.train.optimizer import load_optimizer, optimizer_tensors
from expertflow.train.randomness import PREFIX, put_random_states, random_states, reseed
from expertflow.train.weights import first_not_finite, load_trainable_state, trainable_state

log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, PROGRESS = "weights.safetensors", "optimizer.safetensors", "progress.json"
# The one key of progress.json that is not the run's own.
OURS = "checkpoint"
# Pinned blocks are rounded up to powers of two and stay for the run, so only small ones are used.
PINNED_BYTES = 16 << 20


class NotFinite(TrainingError):
    """A trained parameter is not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run's state in host memory, independent of the training that goes on.

    Only rank 0 holds it (``is_whole``); elsewhere the tensors are left out.
    """

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    progress: dict[str, Any]
    is_whole: bool


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the state directory for one trainer.

    A killed Snakemake leaves its trainer running; a second one would write into the same state.

    Raises:
        TrainingError: another process holds it.
    """
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(
                f"{state}: another trainer is at work there; wait for it, or stop it"
            ) from error
        yield


def take(
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    progress: dict[str, Any],
) -> Snapshot:
    """Copy the state after ``progress["step"]`` finished steps into host memory. A collective.

    ``progress`` is JSON-able; its ``held_out_loss`` (or null) is the loss of these very weights.

    Raises:
        NotFinite: a trained parameter is not.
    """
    step: int = progress["step"]
    if (name := first_not_finite(model)) is not None:
        raise NotFinite(
            f"parameter {name} is not finite after step {step}, so nothing was saved; lower"
            " training.learning_rate or check the data; earlier checkpoints stay"
        )
    several = dist.is_initialized()
    is_whole = not several or dist.get_rank() == 0
    # Ranks that do not write let go of a gathered tensor at once.
    copy = _host_copy if is_whole else (lambda _: torch.empty(0))
    device = next(model.parameters()).device
    weights = trainable_state(model, copy)
    tensors, values = optimizer_tensors(optimizer, model, copy)
    tensors |= random_states(device)
    ours = {
        "world_size": dist.get_world_size() if several else 1,
        "device": device.type,
        "optimizer": values,
        "scaler": scaler.state_dict() if scaler else {},
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Snapshot(
        step=step,
        weights=weights if is_whole else {},
        optimizer=tensors if is_whole else {},
        # By way of JSON: a copy that later changes to the run's lists do not reach.
        progress=json.loads(json.dumps({**progress, OURS: ours})),
        is_whole=is_whole,
    )


def _host_copy(whole: torch.Tensor) -> torch.Tensor:
    """Begin a copy to the host; on CUDA it is there only after a synchronise."""
    pinned = whole.device.type == "cuda" and whole.nbytes <= PINNED_BYTES
    host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
    return host.copy_(whole, non_blocking=pinned)


def write(state: Path, snapshot: Snapshot, *, keep: int) -> Path | None:
    """Write a checkpoint; then remove all but the newest ``keep`` and the best one.

    Does nothing where the snapshot is not whole.

    Raises:
        HardwareError: the disk does not take it.
    """
    if not snapshot.is_whole:
        return None
    target = state / "checkpoints" / f"step-{snapshot.step:08d}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sync_directory(state)
        with replacing(target) as partial:
            _fill(partial, snapshot)
            sync_directory(partial)
            if target.exists():
                _hide(target)
    except (OSError, SafetensorError) as error:
        raise HardwareError(
            f"{target}: the checkpoint could not be written ({error}); free space there, or lower"
            " training.save_total_limit; earlier checkpoints stay"
        ) from error
    _prune(state, keep)
    return target


def _fill(directory: Path, snapshot: Snapshot) -> None:
    directory.mkdir()
    save_file(snapshot.weights, directory / WEIGHTS)
    save_file(snapshot.optimizer, directory / OPTIMIZER)
    sizes = {name: (directory / name).stat().st_size for name in (WEIGHTS, OPTIMIZER)}
    ours = {**snapshot.progress[OURS], "n_bytes": sizes}
    text = json.dumps({**snapshot.progress, OURS: ours})
    (directory / PROGRESS).write_text(text, encoding="utf-8")


def _prune(state: Path, keep: int) -> None:
    kept = {*complete(state)[-max(1, keep) :], best(state)}
    for path in sorted((state / "checkpoints").glob("step-*")):
        if path not in kept:
            _hide(path)
    for path in (state / "checkpoints").glob(".*.old.partial"):
        remove(path)


def _hide(path: Path) -> None:
    """Take a checkpoint out of sight whole; a kill while it is removed leaves no half of it."""
    path.rename(path.with_name(f".{path.name}.{time.monotonic_ns()}.old.partial"))


def remove_partials(state: Path) -> None:
    """Remove what killed savers left half-written or half-removed; the caller holds the lock."""
    for path in (state / "checkpoints").glob(".*.partial"):
        remove(path)


def complete(state: Path) -> list[Path]:
    """List the checkpoints that can be resumed, oldest first; damaged ones are left out, logged."""
    damages = {path: _damage(path) for path in sorted((state / "checkpoints").glob("step-*"))}
    for path, damage in damages.items():
        if damage is not None:
            log.warning("%s is left out: %s", path, damage)
    return [path for path, damage in damages.items() if damage is None]


def newest(state: Path) -> Path | None:
    """Give the checkpoint to resume from."""
    return next(reversed(complete(state)), None)


def best(state: Path) -> Path | None:
    """Give the checkpoint with the lowest held-out loss, of equal ones the oldest."""
    losses = {path: read_progress(path).get("held_out_loss") for path in complete(state)}
    known = {path: loss for path, loss in losses.items() if loss is not None and loss == loss}
    return min(known, key=known.__getitem__) if known else None


def read_progress(directory: Path) -> dict[str, Any]:
    """Give the progress that a checkpoint was saved with."""
    return {key: value for key, value in _record(directory).items() if key != OURS}


def _record(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / PROGRESS).read_text(encoding="utf-8"))
    return record


def n_bytes(directory: Path) -> int:
    """Give the size of a checkpoint; while one is written, the disk holds one more than is kept."""
    return sum(path.stat().st_size for path in directory.iterdir())


def _damage(directory: Path) -> str | None:
    """Say what is wrong with a checkpoint's files, if anything."""
    try:
        sizes: dict[str, int] = _record(directory)[OURS]["n_bytes"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return f"{PROGRESS} cannot be read ({type(error).__name__}: {error})"
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} bytes and was written with {size}"
    return None


def last_seen_s(state: Path) -> float:
    """Give the run's clock where its last session was last seen: by a checkpoint or the monitor.

    What was done between the last checkpoint and a kill is paid for and lost; the monitor's samples
    tell how long it was.
    """
    times = [0.0]
    if saved := complete(state):
        times.append(read_progress(saved[-1])["clock"]["wall"])
    if (state / "gpu.jsonl").is_file():
        times += [sample["elapsed_s"] for sample in read_json_lines(state / "gpu.jsonl")]
    return max(times)


def restore(
    directory: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """Put a checkpoint back into model, optimiser and random generators; give its progress.

    Under another number of processes or on another device than it was saved, random numbers start
    anew from ``progress["seed"]``, the step and the rank.

    Raises:
        TrainingError: the files are damaged, or belong to another model or optimiser.
    """
    restore_weights(directory, model=model)
    ours = _record(directory)[OURS]
    tensors = load_file(directory / OPTIMIZER)
    states = {key: tensors.pop(key) for key in list(tensors) if key.startswith(PREFIX)}
    load_optimizer(optimizer, model, tensors, ours["optimizer"])
    if scaler and ours["scaler"]:
        scaler.load_state_dict(ours["scaler"])
    progress = read_progress(directory)
    device = next(model.parameters()).device
    if (ours["world_size"], ours["device"]) == (world_size, device.type):
        put_random_states(states, rank=rank, device=device)
        return progress
    reseed(seed=progress["seed"], step=progress["step"], rank=rank)
    log.warning(
        "saved by %d processes on %s and resumed by %d on %s: random numbers start anew from seed"
        " %d, step %d and rank %d, so the end is not the one of a run that was never stopped",
        ours["world_size"], ours["device"], world_size, device.type, progress["seed"],
        progress["step"], rank,
    )  # fmt: skip
    return progress


def restore_weights(directory: Path, *, model: Any) -> None:
    """Put the trained weights of a checkpoint back, and nothing else.

    Raises:
        TrainingError: the files are damaged, or belong to another model.
    """
    if damage := _damage(directory):
        raise TrainingError(f"{directory}: {damage}; remove it, and the one before it is used")
    load_trainable_state(model, load_file(directory / WEIGHTS))
