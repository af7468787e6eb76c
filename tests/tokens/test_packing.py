from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.tokens.packing import (
    Piece,
    best_fit_decreasing,
    clip_spans,
    concat_pieces,
    count_targets,
    cut,
    order_rows,
    plan_rows,
)

lengths = st.lists(st.integers(1, 300), max_size=200)


def test_the_worked_example_fills_its_rows() -> None:
    rows = best_fit_decreasing([7, 4, 3, 6], row_length=10)
    assert sorted(sorted(row) for row in rows) == [[0, 2], [1, 3]]


@given(lengths, st.integers(8, 300), st.sampled_from(["split", "truncate", "drop"]))
def test_no_token_is_lost_or_invented(sizes: list[int], row_length: int, overflow: str) -> None:
    cuts = cut(sizes, row_length=row_length, overflow=overflow)
    rows = plan_rows([p.length for p in cuts.pieces], row_length=row_length, packing="bfd")
    placed = list(chain.from_iterable(rows))
    assert sorted(placed) == list(range(len(cuts.pieces)))
    assert all(sum(cuts.pieces[i].length for i in row) <= row_length for row in rows)
    assert sum(p.length for p in cuts.pieces) + cuts.n_tokens_dropped == sum(sizes)


@given(lengths, st.integers(8, 300))
def test_concat_fills_every_row_but_the_last(sizes: list[int], row_length: int) -> None:
    pieces, rows = concat_pieces(sizes, row_length=row_length)
    filled = [sum(pieces[i].length for i in row) for row in rows]
    assert sum(filled) == sum(sizes)
    assert all(n == row_length for n in filled[:-1])
    assert not rows or 0 < filled[-1] <= row_length


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300))
def test_best_fit_stays_near_the_lower_bound(sizes: list[int]) -> None:
    rows = best_fit_decreasing(sizes, row_length=100)
    bound = -(-sum(sizes) // 100)
    # The known guarantee of best-fit-decreasing: at most 11/9 of the optimum, plus one row.
    optimum_at_least = max(bound, sum(size > 50 for size in sizes))
    assert len(rows) <= 11 / 9 * max(optimum_at_least, 1) * 1.25 + 1


@pytest.mark.parametrize("length", [2047, 2048, 2049])
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_lengths_around_the_row_length(length: int, overflow: str) -> None:
    cuts = cut([length], row_length=2048, overflow=overflow)
    if length <= 2048:
        assert cuts.pieces == [Piece(0, 0, length)]
    elif overflow == "split":
        assert cuts.pieces == [Piece(0, 0, 2048), Piece(0, 2048, 1)]
    elif overflow == "truncate":
        assert (cuts.pieces, cuts.n_tokens_dropped) == ([Piece(0, 0, 2048)], 1)
    else:
        assert (cuts.pieces, cuts.n_tokens_dropped) == ([], 2049)


def test_rows_are_shuffled_the_same_way_every_time() -> None:
    assert order_rows(100, seed=1) == order_rows(100, seed=1)
    assert order_rows(100, seed=1) != order_rows(100, seed=2)
    assert sorted(order_rows(100, seed=1)) == list(range(100))


def test_spans_follow_their_document_into_a_row() -> None:
    # Tokens 3-6 of the document are supervised; the piece holds its tokens 4-8, at place 10.
    assert clip_spans([3, 6], Piece(0, 4, 4), offset=10) == [10, 12]
    assert clip_spans([0, 3], Piece(0, 4, 4), offset=10) == []


def test_first_tokens_of_documents_are_no_targets() -> None:
    # Two documents of 4; the first is supervised whole, of the second its last two tokens.
    assert count_targets([0, 4, 6, 8], [4, 4]) == 3 + 2
    assert count_targets([0, 8], [4, 4]) == 6
