"""Save and restore a run: trained weights, optimizer, random numbers, progress.

A checkpoint is a directory of tensors and JSON that appears by one rename, after all its files were
flushed. Full tensors by name let any number of processes resume it.

Checkpoints are written in the background, one at a time: the trainer takes a snapshot, hands it to
a ``Saver``, and calls its ``wait`` before the next, so that host memory has only one.
"""

import json
import logging
import math
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from expertflow.core.errors import HardwareError, TrainingError
from expertflow.core.files import replacing, sha256_text, sync, sync_directory
from expertflow.core.records import Record, seal
from expertflow.train.model.weights import (
    Diverged,
    first_not_finite,
    load_optimizer_state,
    load_trainable_state,
    optimizer_state,
    trainable_state,
    unwrap_optimizer,
)
from expertflow.train.processes import Processes
from expertflow.train.saved import checkpoint_files as files
from expertflow.train.saved.checkpoint_files import OPTIMIZER, OURS, PROGRESS, TENSORS, WEIGHTS

log = logging.getLogger(__name__)

# Pinned blocks are rounded up to powers of two and live as long as the run, so use only small ones.
PINNED_BYTES = 16 << 20
RANDOM = "random/"
POLL_S = 0.5
# Another node's view of a shared file system may be a minute old.
SEEN_WITHIN_S = 180.0
# Stands for no checkpoint where processes exchange integers.
NO_STEP = -1


class Snapshot(Record, frozen=True, kw_only=True):
    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    progress: dict[str, Any]


def take_snapshot(
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    progress: dict[str, Any],
) -> Snapshot | None:
    """Copy the state after ``progress["step"]`` finished steps into host memory. A collective.

    Only rank 0 gets it. ``progress`` is JSON-serializable; its ``held_out_loss`` (or null) is the
    loss of these weights. Raises Diverged if a trained parameter is not finite.
    """
    step: int = progress["step"]
    if (name := first_not_finite(model)) is not None:
        raise Diverged(
            f"parameter {name} is not finite after step {step}, so nothing was saved; lower"
            " training.learning_rate or check the data; earlier checkpoints are kept"
        )
    writes = not dist.is_initialized() or dist.get_rank() == 0
    # Ranks that do not write free a gathered tensor at once.
    copy = _host_copy if writes else (lambda _: torch.empty(0))
    device = next(model.parameters()).device
    weights = trainable_state(model, copy)
    tensors, values = optimizer_state(optimizer, model, copy)
    tensors |= random_states(device)
    ours = {
        # A row per process.
        "world_size": len(tensors[RANDOM + "torch"]),
        "device": device.type,
        "optimizer_class": type(unwrap_optimizer(optimizer)).__name__,
        "optimizer": values,
        "scaler": scaler.state_dict() if scaler else {},
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not writes:
        return None
    # A round trip through JSON gives a copy unaffected by later changes to the run's lists.
    kept = json.loads(json.dumps({**progress, OURS: ours}))
    return Snapshot(step=step, weights=weights, optimizer=tensors, progress=kept)


def _host_copy(whole: torch.Tensor) -> torch.Tensor:
    """Begin a copy to the host; on CUDA it is complete only after a synchronize."""
    pinned = whole.device.type == "cuda" and whole.nbytes <= PINNED_BYTES
    host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
    return host.copy_(whole, non_blocking=pinned)


def write_checkpoint(state: Path, snapshot: Snapshot, *, keep: int) -> Path:
    target = files.directory_of(state, snapshot.step)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Flush the steps up to this one: after a power cut they could not be written again.
        for lines in state.glob("*.jsonl"):
            sync(lines)
        sync_directory(state)
        with replacing(target) as partial:
            partial.mkdir()
            save_file(snapshot.weights, partial / WEIGHTS)
            save_file(snapshot.optimizer, partial / OPTIMIZER)
            ours = {**snapshot.progress[OURS], **files.hash_contents(partial, TENSORS)}
            text = json.dumps(seal({**snapshot.progress, OURS: ours}))
            (partial / PROGRESS).write_text(text, encoding="utf-8")
            sync_directory(partial)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HardwareError(
            f"{target}: the checkpoint could not be written ({reason}); free space there, and run"
            " again; earlier checkpoints are kept"
        ) from error
    files.prune_checkpoints(state, keep)
    return target


def restore_checkpoint(
    directory: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """Load a checkpoint into model, optimizer and random generators; return its progress.

    With another number of processes or on another device, random numbers are reseeded. Raises
    TrainingError if files are damaged or belong to another model or optimizer.
    """
    restore_weights(directory, model=model)
    progress = files.read_progress(directory)
    ours = progress[OURS]
    kind = type(unwrap_optimizer(optimizer)).__name__
    if ours["optimizer_class"] != kind:
        raise TrainingError(
            f"{directory}: the optimizer was {ours['optimizer_class']} and is {kind} in this run;"
            " remove the state and start again"
        )
    tensors = load_file(directory / OPTIMIZER)
    states = {key: tensors.pop(key) for key in list(tensors) if key.startswith(RANDOM)}
    load_optimizer_state(optimizer, model, tensors, ours["optimizer"])
    if scaler and ours["scaler"]:
        scaler.load_state_dict(ours["scaler"])
    device = next(model.parameters()).device
    if (ours["world_size"], ours["device"]) == (world_size, device.type):
        _set_random_states(states, rank=rank, device=device)
        return progress
    number = int(sha256_text(f"{progress['seed']} {progress['step']} {rank}")[:15], 16)
    torch.manual_seed(number)
    random.seed(number)
    log.warning(
        "saved by %d processes on %s and resumed by %d on %s: random numbers are reseeded from seed"
        " %d, step %d and rank %d, so the result differs from an uninterrupted run's",
        ours["world_size"], ours["device"], world_size, device.type, progress["seed"],
        progress["step"], rank,
    )  # fmt: skip
    return progress


def restore_weights(directory: Path, *, model: Any) -> None:
    if found := files.find_damage(directory):
        raise TrainingError(f"{directory}: {found}; remove it to use the one before it")
    load_trainable_state(model, load_file(directory / WEIGHTS))


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return torch's, Python's and the device's generator states, a row per rank. A collective."""
    _, internal, gauss = random.getstate()
    # 32-bit integers, which float64 represents exactly.
    numbers = [*internal, math.nan if gauss is None else gauss]
    own = {"torch": torch.get_rng_state(), "python": torch.tensor(numbers, dtype=torch.float64)}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {RANDOM + kind: _all_ranks(state, device) for kind, state in own.items()}


def _all_ranks(own: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not dist.is_initialized():
        return own[None].clone()
    # NCCL gathers tensors on a card only.
    own = own.to(device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows).cpu()


def _set_random_states(states: dict[str, torch.Tensor], *, rank: int, device: torch.device) -> None:
    torch.set_rng_state(states[RANDOM + "torch"][rank].clone())
    *internal, gauss = states[RANDOM + "python"][rank].tolist()
    random.setstate((3, tuple(map(int, internal)), None if math.isnan(gauss) else gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[RANDOM + "cuda"][rank].clone(), device)


def agree_on(
    own: Path | None, state: Path, processes: Processes, *, within_s: float = SEEN_WITHIN_S
) -> Path | None:
    """Return rank 0's checkpoint, waiting if a shared file system lags. A collective.

    Raises TrainingError if this process does not see the complete checkpoint.
    """
    if processes.world_size == 1:
        return own
    [step], *_ = processes.of_all(NO_STEP if own is None else files.step_of(own))
    if step == NO_STEP:
        return None
    directory = files.directory_of(state, step)
    deadline_s = time.monotonic() + within_s
    while (found := files.find_damage(directory)) is not None:
        if time.monotonic() >= deadline_s:
            raise TrainingError(
                f"{directory}: process {processes.rank} cannot resume from it as the first one"
                f" does, {found}; make sure all nodes share the folder, and run again"
            )
        time.sleep(POLL_S)
        # Listing a folder refreshes it; otherwise a missing entry stays cached as missing.
        list(state.glob("checkpoints/*"))
    return directory


class Saver:
    """A thread that writes snapshots; its error is raised by the next ``submit`` or ``wait``."""

    def __init__(self, state: Path, keep: int) -> None:
        self._state = state
        self._keep = keep
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self.written_s = 0.0

    def submit(self, snapshot: Snapshot) -> None:
        self.wait()
        self._writing = self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, snapshot: Snapshot) -> None:
        start = time.perf_counter()
        write_checkpoint(self._state, snapshot, keep=self._keep)
        self.written_s += time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.wait()
            # Raise the block's own error; only log the thread's.
            elif self._writing is not None and (failure := self._writing.exception()):
                log.error("the last checkpoint was not written: %s", failure)
        finally:
            self._thread.shutdown()
