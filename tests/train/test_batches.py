"""A batch holds what its rows say, whatever it is made together with and whatever loads it."""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import made_up_rows
from tiny_net import train_plan

from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import TENSORS, Batch, Buffers, Collator
from expertflow.train.feed.loader import Feed, ThreadLoader, load_batches
from expertflow.train.feed.order import RowOrder

LENGTH = 24


def by_hand(rows: PackedRows, row: int) -> tuple[list[int], list[int], list[int]]:
    ids = rows.take_ids(np.array([row]))[0].tolist()
    lengths = rows.seq_lengths[row].tolist()
    if sum(lengths) < LENGTH:
        lengths.append(LENGTH - sum(lengths))
    positions = [i for n in lengths for i in range(n)]
    spans = rows.spans[row].tolist()
    targets = {i for s, e in zip(spans[::2], spans[1::2], strict=True) for i in range(s, e)}
    labels = [id_ if i in targets and positions[i] > 0 else IGNORE for i, id_ in enumerate(ids)]
    return positions, labels, np.cumsum(lengths).tolist()


def same(one: Batch, other: Batch) -> bool:
    rest = ("max_documents", "max_length", "n_tokens", "n_target_tokens", "rows")
    return all(torch.equal(getattr(one, k), getattr(other, k)) for k in TENSORS) and all(
        getattr(one, k) == getattr(other, k) for k in rest
    )


@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 6))
def test_a_batch_is_what_its_rows_say(seed: int, n_rows: int) -> None:
    rows = made_up_rows(8, LENGTH, seed=seed)
    chosen = np.random.default_rng(seed).permutation(8)[:n_rows]
    batch = Collator(rows).batch(chosen)
    bounds = [0]
    for i, row in enumerate(chosen.tolist()):
        positions, labels, ends = by_hand(rows, row)
        assert batch.position_ids_BL[i].tolist() == positions
        assert batch.labels_BL[i].tolist() == labels
        bounds += [i * LENGTH + end for end in ends]
    assert batch.cu_seqlens.tolist() == bounds
    assert batch.input_ids_BL.tolist() == rows.take_ids(chosen).tolist()
    assert batch.n_tokens == sum(rows.seq_lengths[row].sum() for row in chosen)
    assert batch.n_target_tokens == int((batch.labels_BL != IGNORE).sum())
    n_bounds = sorted((len(by_hand(rows, row)[2]) for row in range(8)), reverse=True)
    assert batch.max_documents == sum(n_bounds[:n_rows])
    assert {getattr(batch, name).dtype for name in TENSORS} == {torch.int32}


@given(seed=st.integers(0, 10**6), n_documents=st.sampled_from([1, 4]))
def test_batches_made_together_are_those_made_alone(seed: int, n_documents: int) -> None:
    rows = made_up_rows(9, LENGTH, seed=seed, n_documents=n_documents)
    collator, buffers = Collator(rows), Buffers(3, LENGTH, n_batches=4)
    order = np.random.default_rng(seed).permutation(9)
    parts = [order[:3], order[3:4], order[4:6], order[6:]]
    together = collator.batches(parts, buffers)
    assert all(same(a, collator.batch(b)) for a, b in zip(together, parts, strict=True))
    again = collator.batches(parts[::-1], buffers)
    assert all(same(a, collator.batch(b)) for a, b in zip(again, parts[::-1], strict=True))


def test_rows_of_one_document_are_cut_to_the_longest_of_their_batch() -> None:
    ids = np.arange(4 * LENGTH, dtype=np.int32).reshape(4, LENGTH)
    rows = PackedRows.from_lists(ids, [[3], [9], [24], [8]], [[1, 3], [0, 9], [], [0, 8]])
    collator = Collator(rows)
    shapes = [collator.batch(np.array(c)).input_ids_BL.shape for c in ([0, 3], [0, 1], [2, 0])]
    assert shapes == [(2, 8), (2, 16), (2, 24)]
    batch = collator.batch(np.array([1, 0]))
    assert batch.input_ids_BL.tolist() == ids[[1, 0], :16].tolist()
    assert batch.cu_seqlens.tolist() == [0, 9, 16, 19, 32]
    assert (batch.n_tokens, batch.n_padding_tokens, batch.max_length) == (12, 20, 16)
    assert batch.max_documents == 2 + 2
    assert batch.n_target_tokens == 8 + 2


def test_every_token_may_be_a_document() -> None:
    ids = np.arange(2 * LENGTH, dtype=np.int32).reshape(2, LENGTH)
    rows = PackedRows.from_lists(ids, [[1] * LENGTH] * 2, [[0, LENGTH]] * 2)
    for batch in Collator(rows).batches([np.array([0]), np.array([1])]):
        assert batch.cu_seqlens.tolist() == list(range(LENGTH + 1))
        assert (batch.n_target_tokens, batch.n_padding_tokens) == (0, 0)


def made_up_order(n_rows: int, global_batch: int, *, grouped: bool = False) -> RowOrder:
    lengths = np.random.default_rng(9).integers(1, 500, n_rows) if grouped else None
    return RowOrder(n_rows=n_rows, global_batch=global_batch, seed=1, lengths_N=lengths)


@pytest.mark.parametrize("epoch", [0, 2])
def test_one_process_sees_the_seeded_permutation(epoch: int) -> None:
    """Runs that were started with an earlier version see the same rows when they are repeated."""
    order, expected = made_up_order(10, 4), np.random.default_rng([1, epoch]).permutation(10)
    steps = [order.rows_of_step(3 * epoch + i).tolist() for i in range(3)]
    assert steps == [expected[:4].tolist(), expected[4:8].tolist(), expected[8:].tolist()]


def test_grouped_rows_are_sorted_within_50_batches_that_are_then_shuffled() -> None:
    order, rng = made_up_order(303, 4, grouped=True), np.random.default_rng([1, 0])
    lengths, rows = order.lengths_N, rng.permutation(303).tolist()
    assert lengths is not None
    parts = rows[:200], rows[200:]
    longest_first = [row for part in parts for row in sorted(part, key=lambda row: -lengths[row])]
    steps = [longest_first[4 * i : 4 * i + 4] for i in rng.permutation(75)]
    assert [order.rows_of_step(s).tolist() for s in range(75)] == steps
    assert order.rows_of_step(75).tolist() == longest_first[300:]


@given(
    n_rows=st.integers(1, 300),
    global_batch=st.integers(1, 40),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    grouped=st.booleans(),
)
def test_the_ranks_see_the_global_batch_once(
    n_rows: int, global_batch: int, world_size: int, epoch: int, grouped: bool
) -> None:
    order = made_up_order(n_rows, global_batch, grouped=grouped)
    per_epoch = -(-n_rows // global_batch)
    seen: list[int] = []
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        shares = [order.rows_of_step(step)[rank::world_size] for rank in range(world_size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        together = np.concatenate(shares).tolist()
        assert sorted(together) == sorted(order.rows_of_step(step).tolist())
        seen += together
    assert sorted(seen) == list(range(n_rows))


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    walked = made_up_order(100, 7, grouped=True)
    steps = [walked.rows_of_step(s).tolist() for s in range(45)]
    for s in (44, 3, 20):
        assert made_up_order(100, 7, grouped=True).rows_of_step(s).tolist() == steps[s]


CPU = torch.device("cpu")
N_ROWS, N_STEPS = 23, 9


def made_up_feed(n_documents: int = 4, kind: type[Collator] = Collator) -> Feed:
    collator = kind(made_up_rows(N_ROWS, LENGTH, n_documents=n_documents))
    order = RowOrder(n_rows=N_ROWS, global_batch=6, seed=1, lengths_N=collator.n_tokens_N)
    return Feed(
        collator=collator, order=order, micro_batch_size=4, n_steps=N_STEPS, n_steps_per_epoch=4
    )


def batches_of(feed: Feed, step: int = 0) -> list[Batch]:
    return [feed.collator.batch(rows) for rows in feed.between(step, N_STEPS)]


def test_micro_batches_are_the_rows_of_a_step_in_their_order() -> None:
    feed = made_up_feed()
    for step in range(N_STEPS):
        parts = feed.micro_batches(step)
        assert max(map(len, parts)) <= feed.micro_batch_size
        assert np.concatenate(parts).tolist() == feed.order.rows_of_step(step).tolist()


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
    wanted = batches_of(feed, step)
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
    feed = made_up_feed(kind=Broken)
    with pytest.raises(RuntimeError, match="row 7 is broken"):
        with load_batches(feed, 0, plan=plan, device=CPU) as batches:
            list(batches)
    assert nothing_left()


def test_workers_outlive_a_signal_to_all_processes() -> None:
    """The trainer ends its step and saves; it needs batches until then."""
    feed = made_up_feed()
    wanted = batches_of(feed)
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
    wanted = batches_of(feed)
    memory = set()
    with ThreadLoader(feed, 0, n_prefetch=2, device=CPU) as batches:
        for batch, expected in zip(batches, wanted, strict=True):
            time.sleep(0.002)  # the thread runs ahead as far as it may
            assert same(batch, expected)
            memory.add(batch.input_ids_BL.data_ptr())
    assert len(memory) == 6 < len(wanted)


class Gate:
    """An event of a device that is passed when it is opened."""

    def __init__(self) -> None:
        self.through, self.waited_for, self.n_recorded = threading.Event(), threading.Event(), 0

    def record(self) -> None:
        self.n_recorded += 1

    def synchronize(self) -> None:
        if self.n_recorded:
            self.waited_for.set()
            self.through.wait()


def test_buffers_wait_for_the_copies_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs behind still reads them; waiting for it is no waiting for data."""
    gate = Gate()
    made = Buffers.__init__

    def gated(self: Buffers, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.copied = gate  # type: ignore[assignment]

    monkeypatch.setattr(Buffers, "__init__", gated)
    feed = made_up_feed()
    wanted = batches_of(feed)
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
        assert all(same(next(batches), expected) for expected in wanted[3:])
