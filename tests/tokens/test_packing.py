"""Packing as pure math: nothing lost, nothing invented, rows near the bound."""

import inspect

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional

from expertflow.tokens import packing
from expertflow.tokens.ragged import Ragged

lengths = st.lists(st.integers(0, 300), max_size=200).map(lambda n: np.array(n, np.int32))


def filled(pieces: packing.Pieces, rows: Ragged) -> list[int]:
    return Ragged(pieces.length[rows.values], rows.offsets).sum_lists().tolist()


def as_tuples(pieces: packing.Pieces) -> list[tuple[int, int, int]]:
    columns = (pieces.document, pieces.start, pieces.length)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def tokens_of(pieces: packing.Pieces) -> list[tuple[int, int]]:
    """List the tokens of all pieces: their document, and their position in it."""
    return [(d, i) for d, start, n in as_tuples(pieces) for i in range(start, start + n)]


def place_one_by_one(sizes: list[int], row_length: int) -> list[list[int]]:
    """Pack best-fit-decreasing by its definition: each piece goes to the fullest row with room."""
    rows: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fits = [row for row in rows if sum(row) + size <= row_length]
        if fits:
            max(fits, key=sum).append(size)
        else:
            rows.append([size])
    return rows


@given(st.lists(st.integers(1, 60), max_size=120), st.integers(60, 90))
# A row whose length exceeds 16 bits.
@example([1, 69_999, 65_000, 70_000, 5_000], 70_000)
def test_the_histogram_yields_the_rows_of_the_definition(sizes: list[int], row_length: int) -> None:
    rows = packing.best_fit_decreasing(np.array(sizes, np.int32), row_length=row_length).tolist()
    placed = [[sizes[i] for i in row] for row in rows]
    assert all(row == sorted(row, reverse=True) for row in placed)
    # Any row with the same room may be chosen, so the definition only determines the fill.
    assert sorted(map(sum, placed)) == sorted(map(sum, place_one_by_one(sizes, row_length)))


@given(lengths, st.integers(8, 300), st.sampled_from(["split", "truncate", "drop"]))
def test_no_token_is_lost_or_invented(sizes: np.ndarray, row_length: int, overflow: str) -> None:
    pieces = packing.cut_documents(sizes, row_length=row_length, overflow=overflow)
    rows = packing.best_fit_decreasing(pieces.length, row_length=row_length)
    assert sorted(rows.values.tolist()) == list(range(len(pieces.length)))
    assert max(filled(pieces, rows), default=0) <= row_length
    assert (pieces.length > 0).all()
    assert pieces.length.sum() + pieces.n_tokens_dropped == sizes.sum()
    # Others memory-map these columns, in 32 bits.
    for column in (pieces.document, pieces.start, pieces.length):
        assert column.dtype == np.int32
    if overflow == "split":
        assert tokens_of(pieces) == [(d, i) for d, n in enumerate(sizes.tolist()) for i in range(n)]
        assert packing.count_rows(sizes, row_length=row_length) == len(rows)


@example(np.array([1], np.int32), 8)
@given(lengths, st.integers(8, 300))
def test_concat_fills_every_row_but_the_last(sizes: np.ndarray, row_length: int) -> None:
    pieces, rows = packing.concat_pieces(sizes, row_length=row_length)
    n_tokens = filled(pieces, rows)
    assert sum(n_tokens) == sizes.sum()
    assert all(n == row_length for n in n_tokens[:-1])
    assert not n_tokens or 0 < n_tokens[-1] <= row_length
    assert tokens_of(pieces) == [(d, i) for d, n in enumerate(sizes.tolist()) for i in range(n)]


def test_rows_without_targets_are_dropped() -> None:
    """Only the third row of 4 has one: the end of the first document, whose last token is learned.

    The last row has the last token of the second document, without the tokens before it.
    """
    pieces, rows = packing.concat_pieces(np.array([10, 3], np.int32), row_length=4)
    assert rows.tolist() == [[0], [1], [2, 3], [4]]
    spans = Ragged.from_lists([[9, 10], [1, 3]])
    pieces, rows = packing.drop_untrained(pieces, rows, spans)
    assert (as_tuples(pieces), rows.tolist()) == ([(0, 8, 2), (1, 0, 2)], [[0, 1]])
    assert pieces.n_tokens_dropped == 9


def test_pieces_of_equal_length_keep_their_order() -> None:
    # So many that numpy's other sort does not keep it.
    rows = packing.best_fit_decreasing(np.full(1_000, 5), row_length=10)
    assert rows.values.tolist() == list(range(1_000))


def test_torch_ignores_the_label_of_what_is_no_target() -> None:
    ignored = inspect.signature(functional.cross_entropy).parameters["ignore_index"]
    assert ignored.default == packing.IGNORE


def test_spans_are_clipped_to_their_pieces_and_none_is_empty() -> None:
    spans = Ragged.from_lists([[2, 8], [2, 5, 10, 12], [6, 7]])
    starts, lengths, offsets = np.array([5, 5, 5]), np.array([5, 5, 5]), np.array([20, 0, 0])
    clipped = packing.clip_spans(spans, starts, lengths, offsets)
    assert [clipped[i].tolist() for i in range(3)] == [[20, 23], [], [1, 2]]


@given(st.data())
def test_targets_are_supervised_tokens_after_another_of_their_document(data: st.DataObject) -> None:
    rows, spans, expected = [], [], []
    for _ in range(data.draw(st.integers(0, 5))):
        row = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
        marks = data.draw(st.lists(st.booleans(), min_size=sum(row), max_size=sum(row)))
        edges = np.flatnonzero(np.diff([False, *marks, False])).tolist()
        firsts = {sum(row[:i]) for i in range(len(row))}
        rows.append(row)
        spans.append(edges)
        expected.append(sum(mark and i not in firsts for i, mark in enumerate(marks)))
    assert (
        packing.count_targets(Ragged.from_lists(rows), Ragged.from_lists(spans)).tolist()
        == expected
    )
