"""Plan which documents share a row, from their lengths alone.

Worked example, rows of 10, lengths 7 4 3 6: best-fit-decreasing puts 7 with 3 and 6 with 4, two
full rows; in input order 7, 4 + 3 and 6 would need three. A *piece* is a document, or a part that
fits in a row. The plan uses the histogram of lengths, like longest-pack-first packing: equally full
rows form one group, so the cost depends on the row length and hardly on the number of documents.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.tokens.ragged import Ints, Ragged, offsets_of

# The label of non-targets, which torch's cross-entropy ignores.
IGNORE = -100


class Pieces(Record, frozen=True):
    """Documents cut to fit rows, and what is lost.

    Piece i is tokens [start, start + length) of ``document``.
    """

    document: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]
    n_tokens_dropped: int = 0


class Filled(NamedTuple):
    """The contents of a group's rows, last first: ``n`` pieces of ``length`` after ``before``."""

    length: int
    n: int
    before: "Filled | None"


class Group(NamedTuple):
    n_rows: int
    filled: Filled


def cut_documents(lengths: NDArray[np.integer], *, row_length: int, overflow: str) -> Pieces:
    """Split over-long documents, truncate them to their first piece, or drop them."""
    lengths = np.asarray(lengths, np.int32)
    long = lengths > row_length
    if overflow == "split":
        # Rows of 10, a document of 25 -> pieces of 10, 10 and 5 at 0, 10 and 20.
        per_document = -(-lengths // row_length)
        document = np.repeat(np.arange(len(lengths), dtype=np.int32), per_document)
        offsets = offsets_of(per_document)
        start = (np.arange(len(document)) - offsets[document]).astype(np.int32) * row_length
        return Pieces(document, start, np.minimum(row_length, lengths[document] - start))
    kept = lengths > 0
    if overflow == "drop":
        kept &= ~long
    document = np.flatnonzero(kept).astype(np.int32)
    short = np.minimum(row_length, lengths[document])
    n_lost = int(lengths.sum() - short.sum())
    return Pieces(document, np.zeros(len(document), np.int32), short, n_tokens_dropped=n_lost)


def drop_untrained(pieces: Pieces, rows: Ragged, spans: Ragged) -> tuple[Pieces, Ragged]:
    """Drop rows without targets, given each document's supervised ``spans``.

    Each of them, such as the start of a long question, costs a training step and teaches nothing.
    ``rows`` has the pieces in order.
    """
    spans_of_pieces = clip_spans(
        spans.take(pieces.document),
        pieces.start.astype(np.int64),
        pieces.length.astype(np.int64),
        np.zeros(len(pieces.length), np.int64),
    )
    alone = Ragged(pieces.length, np.arange(len(pieces.length) + 1))
    n_targets = count_targets(alone, spans_of_pieces).astype(np.int32)
    is_kept = Ragged(n_targets, rows.offsets).sum_lists() > 0
    trained = np.repeat(is_kept, rows.lengths)
    kept = replace(
        pieces,
        document=pieces.document[trained],
        start=pieces.start[trained],
        length=pieces.length[trained],
        n_tokens_dropped=pieces.n_tokens_dropped + int(pieces.length[~trained].sum()),
    )
    order = np.arange(len(kept.length), dtype=np.int32)
    return kept, Ragged(order, offsets_of(rows.lengths[is_kept]))


def best_fit_decreasing(lengths: NDArray[np.integer], *, row_length: int) -> Ragged:
    """Place each piece, longest first, in the row it fills best; ties keep their order."""
    counts = np.bincount(lengths)
    # Small integers are radix-sorted in linear time.
    small = np.uint16 if row_length < 1 << 16 else np.uint32
    longest_first = np.argsort((row_length - np.asarray(lengths)).astype(small), kind="stable")
    # Pieces are grouped by length: next_piece[n] is the first of length n without a row.
    next_piece = offsets_of(counts[::-1])[:-1][::-1].copy()
    blocks: list[NDArray[np.int32]] = []
    per_row: list[NDArray[np.int64]] = []
    for group in fill_rows(counts, row_length=row_length):
        columns = []
        filled: Filled | None = group.filled
        while filled is not None:
            first = next_piece[filled.length]
            next_piece[filled.length] = last = first + filled.n * group.n_rows
            columns.append(longest_first[first:last].reshape(group.n_rows, filled.n))
            filled = filled.before
        # Built from the last piece back; a row lists its first piece first.
        block = np.concatenate(columns[::-1], axis=1) if len(columns) > 1 else columns[0]
        blocks.append(block.ravel().astype(np.int32))
        per_row.append(np.full(group.n_rows, block.shape[1]))
    if not blocks:
        return Ragged.from_lists()
    return Ragged(np.concatenate(blocks), offsets_of(np.concatenate(per_row)))


def fill_rows(counts: NDArray[np.integer], *, row_length: int) -> Iterator[Group]:
    """Yield groups of equal rows, from a histogram of ``counts[n]`` pieces of length n, none empty.

    A piece goes to the fullest row that fits it, which stays the fullest: so a row takes as many
    pieces of one length as it can at once.
    """
    waiting: list[deque[Group]] = [deque() for _ in range(row_length + 1)]
    rooms = np.zeros(row_length + 1, dtype=bool)

    def put(n_rows: int, room: int, filled: Filled) -> Iterator[Group]:
        if room == 0:
            yield Group(n_rows, filled)
        elif n_rows:
            waiting[room].append(Group(n_rows, filled))
            rooms[room] = True

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            # The first true entry is the fullest row that fits; argmax is also 0 where none is
            # true.
            room = length + int(rooms[length:].argmax())
            if rooms[room]:
                n_rows, before = waiting[room].popleft()
                rooms[room] = bool(waiting[room])
            else:
                room, before = row_length, None
                n_rows = -(-left // (row_length // length))
            # 5 pieces of 3 in new rows of 10: one row of three, with room 1, and one of two, with
            # room 4.
            fits = room // length
            n_full = min(n_rows, left // fits)
            if n_full:
                left -= n_full * fits
                yield from put(n_full, room - fits * length, Filled(length, fits, before))
                n_rows -= n_full
            if left and n_rows:
                yield from put(1, room - left * length, Filled(length, left, before))
                left, n_rows = 0, n_rows - 1
            # Rows that got nothing stay first in their queue.
            if n_rows and before is not None:
                waiting[room].appendleft(Group(n_rows, before))
                rooms[room] = True
    for groups in waiting:
        yield from groups


def count_rows(lengths: NDArray[np.integer], *, row_length: int) -> int:
    pieces = cut_documents(lengths, row_length=row_length, overflow="split").length
    counts = np.bincount(pieces)
    return sum(group.n_rows for group in fill_rows(counts, row_length=row_length))


def concat_pieces(lengths: NDArray[np.integer], *, row_length: int) -> tuple[Pieces, Ragged]:
    """Concatenate all documents and cut every ``row_length`` tokens."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    # A piece ends where its document or its row ends.
    edges = np.unique(np.concatenate(([0], ends, np.arange(0, total, row_length))))
    if total == 0:
        nothing = np.empty(0, np.int32)
        return Pieces(nothing, nothing, nothing), Ragged.from_lists()
    start = edges[:-1]
    # From the right: a start that is also an end belongs to the next document that has tokens.
    document = np.searchsorted(ends, start, side="right")
    first = ends[document] - np.asarray(lengths, np.int64)[document]
    pieces = Pieces(
        document.astype(np.int32),
        (start - first).astype(np.int32),
        np.diff(edges).astype(np.int32),
    )
    per_row = np.bincount(start // row_length)
    return pieces, Ragged(np.arange(len(start), dtype=np.int32), offsets_of(per_row))


def clip_spans(spans: Ragged, starts: Ints, lengths: Ints, offsets: Ints) -> Ragged:
    """Clip each list of spans to its piece [start, start + length), shifted to the offset."""
    owner = np.repeat(np.arange(len(spans)), spans.lengths // 2)
    # Span [2, 8) of the piece [5, 10) at offset 20 -> [5, 8) -> [20, 23).
    low = np.maximum(spans.values[::2], starts[owner])
    high = np.minimum(spans.values[1::2], (starts + lengths)[owner])
    inside = low < high
    owner = owner[inside]
    moved = np.stack((low[inside], high[inside]), axis=1) + (offsets - starts)[owner][:, None]
    n_spans = np.bincount(owner, minlength=len(spans))
    return Ragged(moved.ravel().astype(np.int32), offsets_of(2 * n_spans))


def count_targets(seq_lengths: Ragged, spans: Ragged) -> Ints:
    """Count supervised tokens per row, except each document's first, which has no context."""
    # In tokens from the first row's start, padding not counted.
    row_starts = offsets_of(seq_lengths.sum_lists())
    firsts = offsets_of(seq_lengths.values)[:-1]
    owner = np.repeat(np.arange(len(seq_lengths)), spans.lengths // 2)
    low = spans.values[::2] + row_starts[owner]
    high = spans.values[1::2] + row_starts[owner]
    # Documents start within [low, high) where the span covers their first token.
    targets = high - low - (np.searchsorted(firsts, high) - np.searchsorted(firsts, low))
    return np.bincount(owner, weights=targets, minlength=len(seq_lengths)).astype(np.int64)
