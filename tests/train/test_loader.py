"""Whatever loads them, batches are the same; errors come through, and nothing is left running."""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Struct
from test_batches import LENGTH, made_up_rows, same
from tiny_net import train_plan

from expertflow.plan.records import TrainPlan
from expertflow.train.feed.batches import Batch, Buffers, Collator
from expertflow.train.feed.loader import Feed, ThreadLoader, load_batches
from expertflow.train.feed.order import RowOrder

CPU = torch.device("cpu")
N_ROWS, N_STEPS = 23, 9


def made_up_feed(n_documents: int = 4) -> Feed:
    collator = Collator(made_up_rows(N_ROWS, n_documents=n_documents))
    order = RowOrder(n_rows=N_ROWS, global_batch=6, seed=1, lengths_N=collator.n_tokens_N)
    return Feed(
        collator=collator, order=order, micro_batch_size=4, n_steps=N_STEPS, n_steps_per_epoch=4
    )


def loader(n_workers: int | None, *, persistent: bool = False, n_prefetch: int = 2) -> TrainPlan:
    return train_plan(
        loader="thread" if n_workers is None else "workers",
        dataloader_num_workers=n_workers or 0,
        dataloader_prefetch_factor=n_prefetch,
        dataloader_persistent_workers=persistent,
    )


def nothing_left() -> bool:
    deadline = time.monotonic() + 60  # torch waits some seconds for a worker, and no longer
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    names = [t.name for t in threading.enumerate() if t.name.startswith("loader")]
    return not names and not workers()


def workers() -> list[Any]:
    return [p for p in multiprocessing.active_children() if type(p).__name__ == "ForkProcess"]


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("n_documents", [1, 4])
@pytest.mark.parametrize(
    "plan",
    [loader(None), loader(None, n_prefetch=5), loader(0), loader(2), loader(2, persistent=True)],
    ids=["thread", "thread-5", "inline", "workers", "workers-kept"],
)
def test_batches_are_the_same_whatever_loads_them(
    plan: TrainPlan, n_documents: int, step: int
) -> None:
    feed = made_up_feed(n_documents)
    wanted = [feed.collator.batch(rows) for rows in feed.between(step, N_STEPS)]
    assert len(wanted) == sum(len(feed.micro_batches(s)) for s in range(step, N_STEPS))
    with load_batches(feed, step, plan=plan, device=CPU) as batches:
        for expected in wanted:
            assert same(next(batches), expected)
        with pytest.raises(StopIteration):
            next(batches)
    assert nothing_left()


@pytest.mark.parametrize("plan", [loader(None), loader(2)], ids=["thread", "workers"])
def test_loading_leaves_the_random_state_alone(plan: TrainPlan) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with load_batches(made_up_feed(), 0, plan=plan, device=CPU) as batches:
        next(batches)
    assert torch.equal(torch.get_rng_state(), before)


class Broken(Collator):
    def batches(self, parts: Any, buffers: Any = None) -> list[Batch]:
        if any(7 in part for part in parts):
            raise RuntimeError("row 7 is broken")
        return super().batches(parts, buffers)


@pytest.mark.parametrize("plan", [loader(None), loader(0), loader(2)], ids=["thread", "0", "2"])
def test_an_error_is_raised_in_the_trainer(plan: TrainPlan) -> None:
    rows = made_up_rows(N_ROWS)
    order = RowOrder(n_rows=N_ROWS, global_batch=6, seed=1)
    feed = Feed(
        collator=Broken(rows), order=order, micro_batch_size=4, n_steps=4, n_steps_per_epoch=4
    )
    with pytest.raises(RuntimeError, match="row 7 is broken"):
        with load_batches(feed, 0, plan=plan, device=CPU) as batches:
            list(batches)
    assert nothing_left()


def test_workers_outlive_a_signal_to_all_processes() -> None:
    """The trainer ends its step and saves; it needs batches until then."""
    feed = made_up_feed()
    wanted = [feed.collator.batch(rows) for rows in feed.between(0, N_STEPS)]
    with load_batches(feed, 0, plan=loader(2), device=CPU) as batches:
        made = [next(batches), next(batches)]  # one of each worker, so both are at work
        for worker in workers():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGTERM)
        made += batches
    assert all(same(a, b) for a, b in zip(made, wanted, strict=True))
    assert nothing_left()


def test_a_batch_is_valid_until_the_next_is_asked_for() -> None:
    feed = made_up_feed()
    wanted = [feed.collator.batch(rows) for rows in feed.between(0, N_STEPS)]
    memory = set()
    with ThreadLoader(feed, 0, n_prefetch=2, device=CPU) as batches:
        for batch, expected in zip(batches, wanted, strict=True):
            time.sleep(0.002)  # the thread runs ahead as far as it may
            assert same(batch, expected)
            memory.add(batch.input_ids_BL.data_ptr())
    assert len(memory) == 6 < len(wanted)


class Gate(Struct):
    through: threading.Event
    waited_for: threading.Event
    n_recorded: int = 0

    def record(self) -> None:
        self.n_recorded += 1

    def synchronize(self) -> None:
        if self.n_recorded:
            self.waited_for.set()
            self.through.wait()


def test_buffers_wait_for_the_copies_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs behind still reads them; waiting for it is no waiting for data."""
    gate = Gate(threading.Event(), threading.Event())
    made = Buffers.__init__

    def gated(self: Buffers, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.copied = gate  # type: ignore[assignment]

    monkeypatch.setattr(Buffers, "__init__", gated)
    feed = made_up_feed()
    wanted = [feed.collator.batch(rows) for rows in feed.between(0, N_STEPS)]
    behind = torch.device("meta")  # anything that is not the host
    with ThreadLoader(feed, 0, n_prefetch=1, device=behind) as batches:
        first, second = next(batches), next(batches)
        time.sleep(0.02)
        # The first batch was worked off, but what reads it has only been queued.
        assert gate.n_recorded == 1
        assert same(first, wanted[0]) and same(second, wanted[1])

        def open_later() -> None:
            gate.waited_for.wait(60)
            time.sleep(0.03)
            gate.through.set()

        opener = threading.Thread(target=open_later)
        opener.start()
        assert batches.device_wait_s == 0
        assert same(next(batches), wanted[2])
        assert gate.through.is_set() and batches.device_wait_s > 0.02
        opener.join()
        assert [same(next(batches), expected) for expected in wanted[3:]] == [True] * (
            len(wanted) - 3
        )


def test_targets_of_a_step_count_all_ranks() -> None:
    feed = made_up_feed()
    for step in range(N_STEPS):
        made = [feed.collator.batch(rows) for rows in feed.micro_batches(step)]
        assert feed.count_tokens(step)[0] == sum(batch.n_target_tokens for batch in made)
    two = [
        Feed(
            collator=feed.collator, order=feed.order, micro_batch_size=4, n_steps=N_STEPS,
            n_steps_per_epoch=4, world_size=2, rank=rank,
        )
        for rank in range(2)
    ]  # fmt: skip
    rows = [np.concatenate(rank.micro_batches(3)) for rank in two]
    assert sorted(np.concatenate(rows)) == sorted(np.concatenate(feed.micro_batches(3)))
    assert two[0].count_tokens(3)[0] == two[1].count_tokens(3)[0] == feed.count_tokens(3)[0]
    assert two[0].collator.rows.length == LENGTH
