"""Plan which documents share a row: pure functions over lengths, no tokens touched.

Worked example, rows of 10, lengths 7 4 3 6: best-fit-decreasing puts 7 with 3 and 6 with 4, two
full rows; in input order 7, 4 + 3 and 6 would need three.

A *piece* is a document, or the part of one that fits a row. The plan is made on the histogram of
lengths, as longest-pack-first packing does: rows with equal room are one group, so the cost depends
on the row length and hardly on the number of documents.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

Row = list[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + length) of document ``document``."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Documents cut to fit rows, and what that cost."""

    pieces: list[Piece]
    n_split: int
    n_truncated: int
    n_dropped: int
    n_tokens_dropped: int


def cut(lengths: list[int], *, row_length: int, overflow: str) -> Pieces:
    """Cut over-long documents: into several pieces, to their first piece, or away altogether."""
    pieces: list[Piece] = []
    n_split = n_truncated = n_dropped = n_tokens_dropped = 0
    for document, length in enumerate(lengths):
        if length <= row_length:
            if length:
                pieces.append(Piece(document, 0, length))
        elif overflow == "split":
            n_split += 1
            for start in range(0, length, row_length):
                pieces.append(Piece(document, start, min(row_length, length - start)))
        elif overflow == "truncate":
            n_truncated += 1
            n_tokens_dropped += length - row_length
            pieces.append(Piece(document, 0, row_length))
        else:
            n_dropped += 1
            n_tokens_dropped += length
    return Pieces(pieces, n_split, n_truncated, n_dropped, n_tokens_dropped)


def plan_rows(lengths: list[int], *, row_length: int, packing: str) -> list[Row]:
    """Assign pieces, by index, to rows; no row exceeds ``row_length``."""
    if packing == "bfd":
        return best_fit_decreasing(lengths, row_length=row_length)
    return [[index] for index in range(len(lengths))]


def best_fit_decreasing(lengths: list[int], *, row_length: int) -> list[Row]:
    """Put each piece, longest first, into the row that it fills best.

    Equal lengths keep their order, so the plan depends on nothing but the lengths. Rows that have
    the same room left wait in one queue; the fullest one that still takes the piece is found by
    looking up from the piece's length.
    """
    rows: list[Row] = []
    waiting: list[deque[int]] = [deque() for _ in range(row_length + 1)]
    rooms = np.zeros(row_length + 1, dtype=bool)
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for piece in order.tolist():
        length = lengths[piece]
        room = length + int(rooms[length:].argmax())
        if rooms[room]:
            row = waiting[room].popleft()
            rooms[room] = bool(waiting[room])
        else:
            row, room = len(rows), row_length
            rows.append([])
        rows[row].append(piece)
        left = room - length
        if left:
            waiting[left].append(row)
            rooms[left] = True
    return rows


def concat_pieces(lengths: list[int], *, row_length: int) -> tuple[list[Piece], list[Row]]:
    """Lay all documents end to end and cut every ``row_length`` tokens, through documents."""
    pieces: list[Piece] = []
    rows: list[Row] = [[]]
    room = row_length
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                rows.append([])
                room = row_length
            taken = min(room, length - start)
            rows[-1].append(len(pieces))
            pieces.append(Piece(document, start, taken))
            start, room = start + taken, room - taken
    return pieces, rows if pieces else []


def order_rows(n_rows: int, *, seed: int) -> list[int]:
    """Permute rows: packing emits them longest first, which would be a curriculum."""
    return [int(row) for row in np.random.default_rng(seed).permutation(n_rows)]


def clip_spans(spans: list[int], piece: Piece, *, offset: int) -> list[int]:
    """Give a document's supervised spans inside a piece that lies at ``offset`` in its row.

    The first token of a piece has no context, so it is never a target; its span is left as it is
    and the batch leaves the token out.
    """
    result: list[int] = []
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        low = max(start, piece.start)
        high = min(end, piece.start + piece.length)
        if low < high:
            result += [low - piece.start + offset, high - piece.start + offset]
    return result


def count_targets(spans: list[int], lengths: list[int]) -> int:
    """Count supervised tokens of a row that have context: all but the first of each document."""
    firsts = np.cumsum([0, *lengths[:-1]])
    n = sum(spans[1::2]) - sum(spans[::2])
    covered = sum(
        1
        for first in firsts.tolist()
        for start, end in zip(spans[::2], spans[1::2], strict=True)
        if start <= first < end
    )
    return n - covered
