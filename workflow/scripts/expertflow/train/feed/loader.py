"""Prefetch micro-batches in one thread or in worker processes.

A batch is a pure function of the feed and the step, whatever loads it, and valid until the next one
is requested.
"""

import signal
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, cast

import torch
from msgspec import Struct
from torch.utils.data import DataLoader, Dataset

from expertflow.core.records import fill_record
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Batch, Buffers, Collator, RowOrder, Rows, micro_batch_rows
from expertflow.train.timing import Clock


class BaseFeed(Struct, kw_only=True):
    order: RowOrder
    micro_batch_size: int
    n_steps: int
    world_size: int = 1
    rank: int = 0

    def step_rows(self, step: int) -> tuple[Collator, Rows]:
        """Return the rows of a step over all ranks, and their collator."""
        raise NotImplementedError

    def count_tokens(self, step: int) -> tuple[int, int]:
        """Return a step's targets and tokens over all ranks."""
        collator, rows = self.step_rows(step)
        return int(collator.n_targets_N[rows].sum()), int(collator.n_tokens_N[rows].sum())

    def micro_batches(self, step: int) -> list[Rows]:
        """Return the rows of a step's micro-batches on this rank, equally many on every rank.

        If an epoch's last step leaves a rank fewer, it repeats one of the step's rows with weight
        0.
        """
        rows = self.step_rows(step)[1]
        own = list(micro_batch_rows(rows[self.rank :: self.world_size], self.micro_batch_size))
        return own + [rows[:1]] * (len(self.weights(step)) - len(own))

    def weights(self, step: int) -> list[float]:
        """Return each micro-batch's loss weight on this rank: 1, or 0 for filler."""
        rows = self.step_rows(step)[1]
        # Rows are dealt starting with rank 0, so no rank has more.
        n_own, n_most = (
            -(-len(rows[rank :: self.world_size]) // self.micro_batch_size)
            for rank in (self.rank, 0)
        )
        return [1.0] * n_own + [0.0] * (n_most - n_own)

    def batches_from(self, step: int, device: torch.device) -> Generator[Batch, None, None]:
        for number in range(step, self.n_steps):
            collator, _ = self.step_rows(number)
            for batch in map(collator.batch, self.micro_batches(number)):
                yield batch.pin_memory() if device.type == "cuda" else batch


class Feed(BaseFeed, kw_only=True):
    collator: Collator
    n_steps_per_epoch: int

    def step_rows(self, step: int) -> tuple[Collator, Rows]:
        return self.collator, self.order.rows_of_step(step)

    def between(self, step: int, end: int) -> Iterator[Rows]:
        return chain.from_iterable(self.micro_batches(s) for s in range(step, end))


def make_feed(plan: TrainPlan, rows: PackedRows, *, rank: int = 0) -> Feed:
    collator = Collator(rows, evens_bounds=plan.torch_compile_mode == "reduce-overhead")
    order = RowOrder(
        n_rows=len(rows),
        global_batch=plan.global_batch_sequences,
        seed=plan.seed,
        lengths_N=collator.n_tokens_N if plan.group_by_length else None,
    )
    return fill_record(
        Feed, plan, collator=collator, order=order, micro_batch_size=plan.batch_size, rank=rank
    )


def load_batches(
    feed: BaseFeed, step: int, *, plan: TrainPlan, device: torch.device, clock: Clock | None = None
) -> AbstractContextManager[Iterator[Batch]]:
    """Return all micro-batches from a step on; ``clock`` times the waits for them."""
    if isinstance(feed, Feed) and plan.loader == "thread":
        ahead = plan.dataloader_prefetch_factor
        return closing(_by_thread(feed, step, ahead, device=device, clock=clock or Clock()))
    if isinstance(feed, Feed) and plan.dataloader_num_workers:
        return closing(_by_workers(feed, step, plan=plan, device=device))
    return closing(feed.batches_from(step, device))


def _by_thread(
    feed: Feed, step: int, n_ahead: int, *, device: torch.device, clock: Clock
) -> Generator[Batch, None, None]:
    """Yield micro-batches that one thread makes ahead, in groups.

    Three groups of buffers rotate: for the thread, the trainer, and the device, which runs behind.
    Waiting for the device to finish a group is not waiting for data.
    """
    free: SimpleQueue[Buffers | None] = SimpleQueue()
    filled: SimpleQueue[tuple[Buffers, list[Batch]] | None] = SimpleQueue()
    todo, rows = feed.between(step, feed.n_steps), feed.collator.rows
    for _ in range(3):
        free.put(Buffers(feed.micro_batch_size, rows.length, n_batches=n_ahead, device=device))

    def fill() -> None:
        while (buffers := free.get()) is not None:
            if not (parts := list(islice(todo, n_ahead))):
                return
            filled.put((buffers, feed.collator.batches(parts, buffers)))

    with ThreadPoolExecutor(1, "loader") as pool:
        filling, before = pool.submit(fill), None
        # Ends the wait if the thread fails: result() then raises its error here.
        filling.add_done_callback(lambda _: filled.put(None))
        try:
            while (group := filled.get()) is not None:
                buffers, batches = group
                yield from batches
                if buffers.copied is not None:
                    buffers.copied.record()
                if before is not None:
                    # The device still has the next group to process, so it does not idle meanwhile.
                    start = time.perf_counter()
                    if before.copied is not None:
                        before.copied.synchronize()
                    clock.seconds["data_wait"] -= time.perf_counter() - start
                    free.put(before)
                before = buffers
            filling.result()
        finally:
            free.put(None)


# A Ctrl-C reaches the entire process group; the trainer needs its workers to finish its step.
def _leave_signals_to_the_trainer(_: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class _Epoch(Struct):
    """The rows of the steps from ``step`` to the end of its epoch, iterated again in each epoch."""

    feed: Feed
    step: int

    def end_step(self) -> int:
        per_epoch = self.feed.n_steps_per_epoch
        return min(self.feed.n_steps, (self.step // per_epoch + 1) * per_epoch)

    def __iter__(self) -> Iterator[Rows]:
        return self.feed.between(self.step, self.end_step())


def _by_workers(
    feed: Feed, step: int, *, plan: TrainPlan, device: torch.device
) -> Generator[Batch, None, None]:
    epoch = _Epoch(feed, step)
    loader: DataLoader[Batch] = DataLoader(
        cast(Dataset[Batch], feed.collator),
        sampler=epoch,
        batch_size=None,
        num_workers=plan.dataloader_num_workers,
        prefetch_factor=plan.dataloader_prefetch_factor,
        persistent_workers=plan.dataloader_persistent_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_trainer,
        # A fork shares the mapped rows; other start methods would send a copy.
        multiprocessing_context="fork",
        # Its own, since the loader draws from it: dropout must not depend on the loader.
        generator=torch.Generator(),
    )
    made: Any = None
    try:
        while epoch.step < feed.n_steps:
            # Iterates the sampler again, over the rest of this epoch.
            made = iter(loader)
            yield from made
            epoch.step = epoch.end_step()
    finally:
        # Otherwise an error's traceback, which references the iterator, would keep them alive.
        if made is not None:
            made._shutdown_workers()
