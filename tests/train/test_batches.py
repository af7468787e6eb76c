"""The rows of each step, packed or tokenized in the loop, their batches, and their loaders."""

import multiprocessing
import os
import signal
import threading
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support import document_shard, made_up_rows, pair, tiny_tokenizer, tokenizer_record, wait_for
from tiny_net import train_plan

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record, write_record
from expertflow.data.documents import KEEP
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, ShardRecord
from expertflow.data.render import Renderer
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.engine import Engine
from expertflow.tokens.packing import IGNORE
from expertflow.tokens.tokenize import DocumentRows, tokenize
from expertflow.train.feed.batches import (
    TENSORS,
    Batch,
    Buffers,
    Collator,
    RowOrder,
    micro_batch_rows,
)
from expertflow.train.feed.loader import Feed, load_batches
from expertflow.train.feed.on_the_fly import Documents, OnTheFlyFeed
from expertflow.train.model.packed import document_bounds
from expertflow.train.timing import Clock

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


def content(batch: Batch) -> list[Any]:
    tensors = [getattr(batch, name).tolist() for name in TENSORS]
    return [*tensors, batch.max_length, batch.n_tokens,
            batch.n_target_tokens, batch.rows]  # fmt: skip


@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 6))
def test_a_batch_matches_its_rows(seed: int, n_rows: int) -> None:
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
    assert {getattr(batch, name).dtype for name in TENSORS} == {torch.int32}


@given(seed=st.integers(0, 10**6), n_documents=st.sampled_from([1, 4, LENGTH]))
def test_batches_made_together_equal_those_made_alone(seed: int, n_documents: int) -> None:
    rows = made_up_rows(9, LENGTH, seed=seed, n_documents=n_documents)
    collator, buffers = Collator(rows), Buffers(3, LENGTH, n_batches=4)
    order = np.random.default_rng(seed).permutation(9)
    parts = [order[:3], order[3:4], order[4:6], order[6:]]
    for chosen, memory in ((parts, buffers), (parts[::-1], buffers), (parts, None)):
        alone = [content(collator.batch(part)) for part in chosen]
        assert [content(batch) for batch in collator.batches(chosen, memory)] == alone


def test_batches_with_the_same_number_of_rows_have_as_many_bounds() -> None:
    lengths = [[24], [9, 9], [1, 2, 3], [12, 11]]
    rows = PackedRows.from_lists(np.zeros((4, LENGTH), np.int32), lengths, [[]] * 4)
    collator = Collator(rows, evens_bounds=True)
    chosen = [[0], [2], [0, 1], [2, 3], [1, 2, 3, 0]]
    batches = [collator.batch(np.array(some)) for some in chosen]
    assert [batch.n_bounds for batch in batches] == [5, 5, 8, 8, 13]
    bounds = [document_bounds(batch, torch.device("cpu")).tolist() for batch in batches]
    assert bounds[0] == [0, 24, 24, 24, 24] and bounds[1] == [0, 1, 3, 6, 24]
    assert [len(one) for one in bounds] == [5, 5, 8, 8, 13]
    for batch, padded in zip(batches, bounds, strict=True):
        assert sorted(set(padded)) == batch.cu_seqlens.tolist()
    assert Collator(rows).batch(np.array([0])).n_bounds is None


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
    assert batch.n_target_tokens == 8 + 2


def test_memory_read_by_a_card_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses mocks, as there is no card here."""
    asked, empty = [], torch.empty
    batch = Collator(made_up_rows(2, LENGTH)).batch(np.array([1]))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert batch.pin_memory().labels_BL.tolist() == (batch.labels_BL + 1).tolist()

    def taken(n: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(n, dtype=dtype)

    monkeypatch.setattr(torch, "empty", taken)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: blocking)
    assert Buffers(2, LENGTH, device=torch.device("cuda")).copied
    assert asked == [True] * 4


def made_up_order(n_rows: int, global_batch: int, *, grouped: bool = False) -> RowOrder:
    lengths = np.random.default_rng(9).integers(1, 500, n_rows) if grouped else None
    return RowOrder(n_rows=n_rows, global_batch=global_batch, seed=1, lengths_N=lengths)


def test_one_process_sees_the_seeded_permutation_of_each_epoch() -> None:
    """Runs started with an earlier version see the same rows when they are repeated."""
    order = made_up_order(10, 4)
    for epoch in (0, 2, 1, 0):
        expected = np.random.default_rng([1, epoch]).permutation(10).tolist()
        steps = [order.rows_of_step(3 * epoch + i).tolist() for i in range(3)]
        assert steps == [expected[:4], expected[4:8], expected[8:]]
        digest = sha256(np.array(steps[0], "<i8").tobytes()).hexdigest()
        assert order.sha256_of_step(3 * epoch) == digest
    # The loader may be one epoch ahead; neither order is made again.
    trained, _ = order.rows_of_epoch(1), order.rows_of_epoch(2)
    assert order.rows_of_epoch(1) is trained


def test_grouped_rows_are_sorted_within_50_batches_that_are_then_shuffled() -> None:
    order, rng = made_up_order(303, 4, grouped=True), np.random.default_rng([1, 0])
    lengths, rows = order.lengths_N, rng.permutation(303).tolist()
    assert lengths is not None
    parts = rows[:200], rows[200:]
    longest_first = [row for part in parts for row in sorted(part, key=lambda row: -lengths[row])]
    steps = [longest_first[4 * i : 4 * i + 4] for i in rng.permutation(75)]
    assert [order.rows_of_step(s).tolist() for s in range(75)] == steps
    assert order.rows_of_step(75).tolist() == longest_first[300:]


CPU = torch.device("cpu")
N_ROWS, N_STEPS = 23, 9


def made_up_feed(n_documents: int = 4, kind: type[Collator] = Collator) -> Feed:
    collator = kind(made_up_rows(N_ROWS, LENGTH, n_documents=n_documents))
    order = RowOrder(n_rows=N_ROWS, global_batch=6, seed=1, lengths_N=collator.n_tokens_N)
    return Feed(
        collator=collator, order=order, micro_batch_size=4, n_steps=N_STEPS, n_steps_per_epoch=4
    )


def contents(feed: Feed, step: int = 0) -> list[Any]:
    chosen = (rows for s in range(step, N_STEPS) for rows in feed.micro_batches(s))
    return [content(feed.collator.batch(rows)) for rows in chosen]


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


def workers() -> list[Any]:
    return [p for p in multiprocessing.active_children() if type(p).__name__ == "ForkProcess"]


def assert_nothing_left() -> None:
    wait_for(lambda: not workers())
    assert not [t.name for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("n_documents", [1, 4])
@pytest.mark.parametrize(
    "plan",
    [loader(None), loader(None, n_prefetch=5), loader(0), loader(2), loader(2, persistent=True)],
    ids=["thread", "thread-5", "inline", "workers", "workers-kept"],
)
def test_all_loaders_make_the_same_batches(plan: TrainPlan, n_documents: int, step: int) -> None:
    feed, found = made_up_feed(n_documents), []
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with load_batches(feed, step, plan=plan, device=CPU) as batches:
        for batch in batches:
            time.sleep(0.002)  # loaders run ahead as far as they may
            found.append(content(batch))
    assert found == contents(feed, step)
    assert torch.equal(torch.get_rng_state(), before)
    assert_nothing_left()


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
    assert_nothing_left()


def test_workers_outlive_a_signal_to_all_processes() -> None:
    """The trainer finishes its step and saves; it needs batches until then."""
    feed = made_up_feed()
    with load_batches(feed, 0, plan=loader(2), device=CPU) as batches:
        found = [content(next(batches)) for _ in range(2)]  # one from each worker: both are running
        for worker in workers():
            os.kill(worker.pid, signal.SIGTERM)
        found += map(content, batches)
    assert found == contents(feed)
    assert_nothing_left()


def test_buffers_wait_for_the_copies_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that lags behind still reads them; waiting for it does not count as data wait."""
    feed, made, read = made_up_feed(), list[Batch](), list[Any]()
    init, n_recorded = Buffers.__init__, [0]

    class Event:
        def record(self) -> None:
            n_recorded[0] += 1

        def synchronize(self) -> None:
            time.sleep(0.01)
            # The second-to-last batch was processed, but the work that reads it is only queued.
            read.append(content(made[-2]))

    def watched(self: Buffers, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.copied = Event()  # type: ignore[assignment]

    monkeypatch.setattr(Buffers, "__init__", watched)
    behind = torch.device("meta")  # anything but the host
    clock = Clock()
    thread = loader(None, n_prefetch=1)
    with load_batches(feed, 0, plan=thread, device=behind, clock=clock) as batches:
        made += [next(batches), next(batches)]
        assert (n_recorded, clock.seconds["data_wait"]) == ([1], 0)
        for batch in batches:
            made.append(batch)
    assert read == contents(feed)[:-1]
    assert n_recorded == [len(made)] and -clock.seconds["data_wait"] >= 0.01 * len(read)


CUT = 40
SHARDS = {"000": range(30), "001": range(30, 55)}
# Numbers of the kept documents: the second one of a shard twice.
KEPT = {name: [i for i in numbers if i % 7] for name, numbers in SHARDS.items()}
COPIES = {numbers[1]: 2 for numbers in SHARDS.values()}


def body(i: int) -> Body:
    return pair(f"ask {i}", "tell " * (i % 9 + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two shards of documents; every fifth is held out."""
    path = tmp_path_factory.mktemp("documents")
    tiny_tokenizer(path)
    with pa.OSFile(str(path / "keep.arrow"), "wb") as sink, pa.ipc.new_stream(sink, KEEP) as keep:
        for name, numbers in SHARDS.items():
            made = document_shard(path, [body(i) for i in numbers], shard=name)
            write_record(path / f"{name}.json", made)
            kept = KEPT[name]
            columns = {
                "source": ["s"] * len(kept), "shard": [name] * len(kept),
                "row": [i - numbers[0] for i in kept], "held_out": [i % 5 == 0 for i in kept],
                "n_copies": [COPIES.get(i, 1) for i in kept],
            }  # fmt: skip
            keep.write_batch(pa.RecordBatch.from_pydict(columns, schema=KEEP))
    return path


def expected(folder: Path, *, held_out: bool) -> list[tuple[list[int], list[int]]]:
    numbers = [i for kept in KEPT.values() for i in kept for _ in range(COPIES.get(i, 1))]
    chosen = [i for i in numbers if (i % 5 == 0) == held_out]
    renderer = Renderer(chatml_layout())
    tokens = tokenize([renderer.render(body(i)) for i in chosen], Engine(folder))
    ids, spans = tokens.ids, tokens.spans
    return [(ids[n][:CUT].tolist(), spans[n].clip(max=CUT).tolist()) for n in range(len(chosen))]


def documents(folder: Path, held_out: bool, shards: Any = tuple(SHARDS)) -> DocumentRows:
    model: Any = SimpleNamespace(path=str(folder), tokenizer=tokenizer_record())
    paths = tuple(folder / f"{name}.json" for name in shards)
    made = Documents(shards=paths, keep=folder / "keep.arrow")
    return made.rows(model, held_out=held_out, length=CUT)


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_are_the_kept_documents(folder: Path, held_out: bool) -> None:
    rows = documents(folder, held_out=held_out)
    wanted = expected(folder, held_out=held_out)
    assert len(rows) == len(wanted) > 5
    order = np.arange(len(rows))[::-1]
    taken = rows.take(order)
    ids_NL = taken.take_ids(np.arange(len(order)))
    for at, i in enumerate(order.tolist()):
        ids, spans = wanted[i]
        assert ids_NL[at, : len(ids)].tolist() == ids
        assert not ids_NL[at, len(ids) :].any()
        assert taken.seq_lengths[at].tolist() == [len(ids)]
        assert taken.spans[at].tolist() == spans


def test_a_step_reads_the_rows_of_its_order(folder: Path) -> None:
    rows = documents(folder, held_out=False)
    order = RowOrder(n_rows=len(rows), global_batch=6, seed=3)
    feed = OnTheFlyFeed(documents=rows, order=order, micro_batch_size=4, n_steps=12)
    collator, batches = Collator(rows.take(np.arange(len(rows)))), feed.batches_from(2, CPU)
    n = len(TENSORS)
    for step in range(2, 12):
        chosen = order.rows_of_step(step)
        assert feed.count_tokens(step)[0] == collator.n_targets_N[chosen].sum()
        for part in micro_batch_rows(chosen, 4):
            assert content(next(batches))[:n] == content(collator.batch(part))[:n]
    assert next(batches, None) is None


def test_a_document_the_model_cannot_read_is_an_empty_row(folder: Path) -> None:
    special = ("ask 1", "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    layout = replace(chatml_layout(), special_tokens=special, text_special_tokens="reject")
    rows = DocumentRows(
        [read_record(ShardRecord, folder / "000.json")], folder / "keep.arrow", held_out=False,
        tokenizer=folder, layout=layout, length=CUT,
    )  # fmt: skip
    everything = np.arange(len(rows))
    taken = rows.take(everything)
    assert 0 < (taken.seq_lengths.lengths == 0).sum() < len(rows)
    collator = Collator(taken)
    assert collator.batch(everything).n_target_tokens == collator.n_targets_N.sum() > 0


def test_without_documents_there_is_nothing_to_train_on(folder: Path) -> None:
    with pytest.raises(TrainingError, match="keeps no documents"):
        documents(folder, held_out=False, shards=())
