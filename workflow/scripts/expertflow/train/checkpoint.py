"""Save and restore the whole state of a run: trained weights, optimiser, random numbers, clock.

A checkpoint is a directory that appears by one rename, after everything in it was flushed, so a
half-written one is never seen. The state of the data order needs no saving: batches are a function
of the step.
"""

import fcntl
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from expertflow.core.errors import TrainingError
from expertflow.core.files import read_json_lines, remove, replacing
from expertflow.train.weights import load_trainable_state, trainable_state

WEIGHTS, OPTIMIZER, PROGRESS = "weights.safetensors", "optimizer.pt", "progress.json"


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the state directory for one trainer.

    A killed Snakemake leaves its trainer running; without the lock a second one would write into
    the same state.

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


def save(
    state: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    progress: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint for ``progress["step"]`` finished steps; keep the newest ``keep``."""
    with replacing(state / "checkpoints" / f"step-{progress['step']:08d}") as partial:
        partial.mkdir(parents=True)
        save_file(trainable_state(model), partial / WEIGHTS)
        tensors = {
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        torch.save(tensors, partial / OPTIMIZER)
        text = json.dumps({**progress, "python_rng": random.getstate()})
        (partial / PROGRESS).write_text(text)
    for old in complete(state)[:-keep]:
        remove(old)


def complete(state: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    return sorted((state / "checkpoints").glob("step-*"))


def remove_partials(state: Path) -> None:
    """Remove what killed savers left half-written; the caller holds the lock."""
    for path in (state / "checkpoints").glob(".*.partial"):
        remove(path)


def last_seen_s(state: Path) -> float:
    """Give the run's clock where its last session was last seen: by a checkpoint or the monitor.

    What was done between the last checkpoint and a kill is paid for and lost; the monitor's samples
    tell how long it was.
    """
    times = [0.0]
    if saved := complete(state):
        progress = json.loads((saved[-1] / PROGRESS).read_text(encoding="utf-8"))
        times.append(progress["clock"]["wall"])
    if (state / "gpu.jsonl").is_file():
        times += [sample["elapsed_s"] for sample in read_json_lines(state / "gpu.jsonl")]
    return max(times)


def restore(
    directory: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    """Put a checkpoint back into model, optimiser and random generators; give its progress.

    The optimiser file is read with ``weights_only``: it can hold tensors and plain values, no code.
    """
    load_trainable_state(model, load_file(directory / WEIGHTS))
    tensors = torch.load(directory / OPTIMIZER, weights_only=True, map_location="cpu")
    optimizer.load_state_dict(tensors["optimizer"])
    if scaler and tensors["scaler"]:
        scaler.load_state_dict(tensors["scaler"])
    torch.set_rng_state(tensors["torch_rng"])
    if tensors["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(tensors["cuda_rng"])
    progress: dict[str, Any] = json.loads((directory / PROGRESS).read_text())
    version, internal, gauss = progress["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    return progress
