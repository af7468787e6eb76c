"""What to do when memory is short: say it well, and go on with smaller micro-batches."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from expertflow.core.errors import TrainingError
from expertflow.core.format import gib
from expertflow.core.records import read_record, write_record
from expertflow.plan.records import TrainPlan
from expertflow.train.feed.loader import Feed
from expertflow.train.records import MemoryRetry
from expertflow.train.run import Run
from expertflow.train.shortage import is_short

RETRIES_FILE = "memory.json"
MAX_RETRIES = 3


class OutOfMemory(TrainingError):
    """Memory is short; the message says what to change."""


@contextlib.contextmanager
def memory_advice(plan: TrainPlan, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into what to change, and to what."""
    try:
        yield
    except RuntimeError as error:
        if not is_short(error):
            raise
        raise OutOfMemory(advice(plan, device)) from error


def advice(plan: TrainPlan, device: torch.device) -> str:
    """Say what was tried, what was predicted and free, and which setting to change to what."""
    if plan.batch_size > 1:
        less = halved(plan)
        change = (
            f"set training.batch_size to {less.batch_size} and gradient_accumulation_steps to"
            f" {less.gradient_accumulation_steps} (the global batch stays)"
        )
    elif not plan.gradient_checkpointing:
        change = "set training.gradient_checkpointing to true"
    else:
        change = "use method qlora, a shorter max_seq_length, a smaller model or a larger card"
    predicted = plan.predicted_peak_bytes
    said = "no peak was predicted" if predicted is None else f"predicted {gib(predicted)}"
    free = "unknown"
    if device.type == "cuda":
        free = gib(torch.cuda.mem_get_info(device)[0])
    return f"out of memory at micro-batch {plan.batch_size} ({said}, {free} free); {change}"


def halved(plan: TrainPlan) -> TrainPlan:
    """Give the plan with half the micro-batch and the same global batch."""
    micro = plan.batch_size // 2
    share = plan.global_batch_sequences // plan.world_size
    return replace(plan, batch_size=micro, gradient_accumulation_steps=-(-share // micro))


def retries(state: Path) -> tuple[MemoryRetry, ...]:
    """Read how often memory was short in this run so far."""
    path = state / RETRIES_FILE
    if not path.is_file():
        return ()
    return read_record(tuple[MemoryRetry, ...], path)


def lowered(plan: TrainPlan, state: Path) -> TrainPlan:
    """Give the plan as this run goes on with it, after what it learned about memory.

    A micro-batch that was asked for stays as it is.
    """
    known = retries(state)
    if not known or not plan.may_halve_micro_batch:
        return plan
    last = known[-1]
    return replace(
        plan,
        batch_size=last.micro_batch_size,
        gradient_accumulation_steps=last.n_accumulation_steps,
    )


def note_retry(plan: TrainPlan, state: Path, *, after_step: int, message: str) -> bool:
    """Note that the run goes on with half the micro-batch of ``plan``; false where it cannot."""
    known = retries(state)
    if not plan.may_halve_micro_batch or plan.batch_size < 2 or len(known) >= MAX_RETRIES:
        return False
    less = halved(plan)
    retry = MemoryRetry(
        after_step=after_step,
        micro_batch_size=less.batch_size,
        n_accumulation_steps=less.gradient_accumulation_steps,
        message=message,
    )
    write_record(state / RETRIES_FILE, (*known, retry))
    return True


def rehearse(run: Run) -> None:
    """Run the longest micro-batch forward and backward, and forget it.

    Rows that are cut to the longest of their batch differ in length, and the longest may come late;
    so a run that does not fit fails at once. Packed rows are all of one length.
    """
    feed = run.feed
    if not isinstance(feed, Feed) or not feed.collator.cuts:
        return
    longest = np.argsort(-feed.collator.n_tokens_N, kind="stable")[: feed.micro_batch_size]
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices), memory_advice(run.plan, run.device):
        with run.processes.accelerator.autocast():
            loss = run.loss(feed.collator.batch(longest))
        run.processes.accelerator.backward(loss)
    run.optimizer.zero_grad(set_to_none=True)
