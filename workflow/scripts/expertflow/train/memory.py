"""Handle low memory: advice, and retries with smaller micro-batches."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from expertflow.core.errors import TrainingError, TransientError
from expertflow.core.format import gib
from expertflow.core.records import read_record, write_record
from expertflow.plan.memory import suggest_others
from expertflow.plan.records import TrainPlan
from expertflow.train.device import is_out_of_memory
from expertflow.train.records import MemoryRetry
from expertflow.train.saved import checkpoint_files

log = logging.getLogger(__name__)
RETRIES_FILE = "memory.json"
MAX_RETRIES = 3


class OutOfMemory(TrainingError):
    """Memory ran out; the message says what to change."""


@contextlib.contextmanager
def memory_advice(
    plan: TrainPlan, device: torch.device, *, saved_step: int | None = None
) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if saved_step is not None:
            # No activations are held now, so a smaller micro-batch would not help.
            raise TrainingError(
                f"out of memory while gathering the weights to save step {saved_step}; use"
                f" {suggest_others(plan)}; earlier checkpoints are kept"
            ) from error
        raise OutOfMemory(describe_shortage(plan, device)) from error


def describe_shortage(plan: TrainPlan, device: torch.device) -> str:
    predicted = plan.predicted_peak_bytes
    peak = "no peak was predicted" if predicted is None else f"predicted {gib(predicted)}"
    free = gib(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else "unknown"
    shortage = f"out of memory at micro-batch {plan.batch_size} ({peak}, {free} free)"
    return f"{shortage}; {suggest_less(plan)}"


def suggest_less(plan: TrainPlan) -> str:
    if plan.batch_size > 1:
        less = split_batch(plan, plan.batch_size // 2)
        return (
            f"set training.batch_size to {less.batch_size} and gradient_accumulation_steps to"
            f" {less.gradient_accumulation_steps} (the global batch stays the same)"
        )
    if not plan.gradient_checkpointing:
        return "set training.gradient_checkpointing to true"
    return f"use a shorter max_seq_length, {suggest_others(plan)}"


def split_batch(plan: TrainPlan, most_rows: int) -> TrainPlan:
    """Return the plan with the largest micro-batch of at most so many rows; same global batch."""
    share = plan.batch_size * plan.gradient_accumulation_steps
    # Share 12, at most 5 rows -> 4 rows, 3 times: 5 does not divide the share.
    micro = next(n for n in range(most_rows, 0, -1) if share % n == 0)
    return replace(plan, batch_size=micro, gradient_accumulation_steps=share // micro)


def read_retries(state: Path) -> tuple[MemoryRetry, ...]:
    path = state / RETRIES_FILE
    return read_record(tuple[MemoryRetry, ...], path) if path.is_file() else ()


def apply_oom_retries(plan: TrainPlan, state: Path) -> TrainPlan:
    known = read_retries(state)
    if not known or not plan.may_halve_micro_batch:
        return plan
    # An earlier session may have been on larger cards, or on more of them.
    return split_batch(plan, min(plan.batch_size, known[-1].micro_batch_size))


def note_retry(plan: TrainPlan, state: Path, error: OutOfMemory) -> None:
    """Make the next attempt use half the micro-batch, or raise if no retry is allowed."""
    known = read_retries(state)
    if not plan.may_halve_micro_batch or plan.batch_size < 2:
        raise error
    # Another process of this run came first, and wrote the retry that this one needs.
    if known and known[-1].micro_batch_size < plan.batch_size:
        raise TransientError(f"{error}; another process recorded this; run again") from error
    if len(known) >= MAX_RETRIES:
        raise error
    newest = checkpoint_files.newest_checkpoint(state)
    done = 0 if newest is None else checkpoint_files.step_of(newest)
    less = split_batch(plan, plan.batch_size // 2)
    retry = MemoryRetry(
        after_step=done,
        micro_batch_size=less.batch_size,
        n_accumulation_steps=less.gradient_accumulation_steps,
        message=str(error),
    )
    write_record(state / RETRIES_FILE, (*known, retry))
    if plan.world_size > 1:
        # The other ranks wait for this one, so only a restart brings them back together.
        raise TransientError(f"{error}; run again to use these after step {done}") from error
    log.warning("%s; continuing with these after step %d", error, done)
