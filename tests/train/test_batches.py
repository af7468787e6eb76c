"""A batch holds what its rows say: ids, documents, targets, whatever it is made together with."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertflow.tokens.arrow import PackedRows, read_rows, write_rows
from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import Batch, Buffers, Collator, targets_per_row
from expertflow.train.feed.order import RowOrder

LENGTH = 24


def made_up_rows(n_rows: int, *, seed: int = 0, n_documents: int = 4) -> PackedRows:
    rng = np.random.default_rng(seed)
    lengths, spans = [], []
    for _ in range(n_rows):
        cuts = rng.choice(np.arange(1, LENGTH + 1), rng.integers(1, n_documents + 1), replace=False)
        lengths.append(np.diff(np.sort(cuts), prepend=0).tolist())
        edges = rng.choice(np.arange(cuts.max() + 1), 2 * rng.integers(0, 3), replace=True)
        spans.append(np.sort(edges).tolist())
    ids = rng.integers(0, 97, (n_rows, LENGTH)).astype(np.int32)
    return PackedRows.from_lists(ids, lengths, spans)


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
    tensors = ("input_ids_BL", "position_ids_BL", "labels_BL", "cu_seqlens")
    rest = ("max_documents", "max_length", "n_tokens", "n_target_tokens", "rows")
    return all(torch.equal(getattr(one, k), getattr(other, k)) for k in tensors) and all(
        getattr(one, k) == getattr(other, k) for k in rest
    )


@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 6))
def test_a_batch_is_what_its_rows_say(seed: int, n_rows: int) -> None:
    rows = made_up_rows(8, seed=seed)
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
    assert {t.dtype for t in (batch.input_ids_BL, batch.labels_BL, batch.cu_seqlens)} == {
        torch.int32
    }


@given(seed=st.integers(0, 10**6), n_documents=st.sampled_from([1, 4]))
def test_batches_made_together_are_those_made_alone(seed: int, n_documents: int) -> None:
    rows = made_up_rows(9, seed=seed, n_documents=n_documents)
    collator, buffers = Collator(rows), Buffers(3, LENGTH, n_batches=4)
    order = np.random.default_rng(seed).permutation(9)
    parts = [order[:3], order[3:4], order[4:6], order[6:]]
    together = collator.batches(parts, buffers)
    assert all(same(a, collator.batch(b)) for a, b in zip(together, parts, strict=True))
    again = collator.batches(parts[::-1], buffers)
    assert all(same(a, collator.batch(b)) for a, b in zip(again, parts[::-1], strict=True))


@given(seed=st.integers(0, 10**6))
def test_targets_of_a_step_are_known_before_its_batches(seed: int) -> None:
    rows = made_up_rows(12, seed=seed)
    alone = [Collator(rows).batch(np.array([row])) for row in range(12)]
    counted = [int((batch.labels_BL != IGNORE).sum()) for batch in alone]
    assert targets_per_row(rows).tolist() == counted


@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 9))
def test_no_batch_has_more_documents_than_said(seed: int, n_rows: int) -> None:
    rows = made_up_rows(9, seed=seed)
    chosen = np.random.default_rng(seed).permutation(9)[:n_rows]
    batch = Collator(rows).batch(chosen)
    per_row = sorted((len(by_hand(rows, row)[2]) for row in range(9)), reverse=True)
    assert len(batch.cu_seqlens) - 1 <= sum(per_row[:n_rows]) == batch.max_documents


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


def test_rows_read_from_disk_in_several_parts_give_the_same(tmp_path: Path) -> None:
    rows = made_up_rows(10)
    parts = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 10)]
    written = (
        PackedRows((rows.take_ids(p),), rows.seq_lengths.take(p), rows.spans.take(p)) for p in parts
    )
    write_rows(tmp_path / "rows", written, length=LENGTH)
    read, chosen = read_rows(tmp_path / "rows"), np.array([9, 0, 5, 3])
    assert len(read.parts_NL) == 3
    assert same(Collator(read).batch(chosen), Collator(rows).batch(chosen))


def made_up_order(n_rows: int, global_batch: int, *, grouped: bool = False) -> RowOrder:
    lengths = np.random.default_rng(9).integers(1, 500, n_rows) if grouped else None
    return RowOrder(n_rows=n_rows, global_batch=global_batch, seed=1, lengths_N=lengths)


def test_each_epoch_has_its_own_order() -> None:
    order = made_up_order(10, 4)
    steps = [order.rows_of_step(s) for s in range(6)]
    first, second = np.concatenate(steps[:3]), np.concatenate(steps[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]


def test_one_process_sees_the_seeded_permutation() -> None:
    """Runs that were started with an earlier version see the same rows when they are repeated."""
    expected = np.random.default_rng([1, 2]).permutation(10)
    order = made_up_order(10, 4)
    assert np.concatenate([order.rows_of_step(s) for s in (6, 7, 8)]).tolist() == expected.tolist()


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


def test_grouped_rows_are_of_similar_length_and_steps_are_not_sorted() -> None:
    order, plain = made_up_order(4000, 16, grouped=True), made_up_order(4000, 16)
    lengths = order.lengths_N
    assert lengths is not None

    def spread(of: RowOrder) -> float:
        return float(np.mean([np.ptp(lengths[of.rows_of_step(s)]) for s in range(250)]))

    assert spread(order) < 0.1 * spread(plain)
    means = [lengths[order.rows_of_step(s)].mean() for s in range(250)]
    assert abs(np.corrcoef(means, np.arange(250))[0, 1]) < 0.2
