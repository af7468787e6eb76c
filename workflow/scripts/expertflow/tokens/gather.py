"""Gather documents' tokens into rows, in flat memory.

A few rows at a time: their documents are read in the order in which they lie in the token files,
each straight to its place. Memory mapping would be as quick, and the whole corpus would count as
the job's memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.tokens.arrow import IDS_DTYPE, PAD_ID, RowBatch
from expertflow.tokens.kept import SplitDocuments
from expertflow.tokens.packing import Pieces, clip_spans
from expertflow.tokens.ragged import Ints, Ragged, offsets_of

BATCH_BYTES = 32 << 20


def row_batches(
    documents: SplitDocuments,
    pieces: Pieces,
    rows: Ragged,
    *,
    length: int,
    done: Callable[[int], None] = lambda n: None,
) -> Iterator[RowBatch]:
    """Yield rows of pieces, padded to ``length``; ``done`` is told the number of rows.

    A batch is valid until the next one is asked for.
    """
    per_batch = max(1, BATCH_BYTES // (length * IDS_DTYPE.itemsize))
    ids = np.empty((min(per_batch, len(rows)), length), IDS_DTYPE)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")).fileno() for path in documents.paths]
        for first in range(0, len(rows), per_batch):
            part = rows.take(np.arange(first, min(first + per_batch, len(rows))))
            numbers = part.values
            lengths = Ragged(pieces.length[numbers], part.offsets)
            n_tokens = lengths.sums()
            # Where each piece lies in its row, and its row in the batch.
            before = offsets_of(lengths.values)[:-1]
            at = before - np.repeat(offsets_of(n_tokens)[:-1], lengths.lengths)
            place = at + np.repeat(np.arange(len(part)) * length, lengths.lengths)
            taken = ids[: len(part)]
            _pad(taken, n_tokens)
            document = pieces.document[numbers]
            _read(
                files,
                documents.shard[document],
                documents.offset[document] + pieces.start[numbers],
                lengths.values,
                place,
                out=taken,
            )
            spans = clip_spans(
                documents.spans.take(document),
                pieces.start[numbers].astype(np.int64),
                lengths.values.astype(np.int64),
                at,
            )
            in_rows = Ragged(spans.values, spans.offsets[part.offsets])
            yield RowBatch(taken, lengths, in_rows)
            done(len(part))


def _pad(ids_NL: NDArray[np.int32], n_tokens: Ints) -> None:
    """Fill what lies behind a row's tokens."""
    for row in np.flatnonzero(n_tokens < ids_NL.shape[1]).tolist():
        ids_NL[row, n_tokens[row] :] = PAD_ID


def _read(
    files: list[int],
    shard: NDArray[np.uint16],
    offset: Ints,
    length: NDArray[np.int32],
    place: Ints,
    *,
    out: NDArray[np.int32],
) -> None:
    """Read pieces from the token files to their places in ``out``, in the order of the files."""
    size = IDS_DTYPE.itemsize
    order = np.lexsort((offset, shard))
    memory = out.reshape(-1).data.cast("B")
    starts, ends = place[order] * size, (place + length)[order] * size
    columns = (shard[order], offset[order] * size, starts, ends)
    read = os.preadv
    for number, at, start, end in zip(*(c.tolist() for c in columns), strict=True):
        if read(files[number], (memory[start:end],), at) != end - start:
            raise DataError("a token file ends early; delete the expert's tokens and run again")
