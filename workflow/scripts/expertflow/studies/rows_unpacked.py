"""Take packed rows apart: the documents of the first steps of a plan, one a row.

Nothing is tokenised or cut again, so that a run on these rows sees the tokens and targets that the
same steps of the plan see, in another order and with padding.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PAD_ID, PackedRows, RowBatch, read_rows, write_rows
from expertflow.tokens.packing import clip_spans
from expertflow.tokens.ragged import Ragged, offsets_of, runs
from expertflow.train.feed.order import RowOrder

# Packed rows that are taken apart at a time.
BLOCK_ROWS = 256


class FirstRows(Record, frozen=True, kw_only=True):
    """The rows that the first steps of a plan take, each once, and what is in them."""

    chosen: NDArray[np.int64]
    n_documents: int
    n_tokens: int
    longest_tokens: int

    @property
    def documents_per_row(self) -> float:
        """Give the mean number of documents in a row."""
        return self.n_documents / len(self.chosen)

    @property
    def tokens_per_row(self) -> float:
        """Give the mean number of tokens in a row, padding left out."""
        return self.n_tokens / len(self.chosen)


def first_rows(plan: TrainPlan, rows: PackedRows, *, n_steps: int) -> FirstRows:
    """Find the rows that the first steps of a plan take, in their order."""
    lengths = rows.seq_lengths.sums()
    order = RowOrder(
        n_rows=len(rows),
        global_batch=plan.global_batch_sequences,
        seed=plan.seed,
        lengths_N=lengths if plan.group_by_length else None,
    )
    taken = np.concatenate([order.rows_of_step(step) for step in range(n_steps)])
    _, first = np.unique(taken, return_index=True)
    chosen = taken[np.sort(first)].astype(np.int64)
    documents = rows.seq_lengths.take(chosen)
    return FirstRows(
        chosen=chosen,
        n_documents=len(documents.values),
        n_tokens=int(documents.values.sum()),
        longest_tokens=int(documents.values.max()),
    )


def write_unpacked(packed: Path, folder: Path, first: FirstRows) -> None:
    """Write a folder of rows as training reads it: documents one a row, and the same held-out."""
    rows = read_rows(packed / "train")
    folder.mkdir(parents=True)
    write_rows(folder / "train", _documents(rows, first.chosen), length=rows.length)
    (folder / "held_out").symlink_to((packed / "held_out").resolve())


def _documents(rows: PackedRows, chosen: NDArray[np.int64]) -> Iterator[RowBatch]:
    for start in range(0, len(chosen), BLOCK_ROWS):
        yield apart(rows, chosen[start : start + BLOCK_ROWS])


def apart(rows: PackedRows, chosen: NDArray[np.int64]) -> RowBatch:
    """Give the documents of some rows, one a row."""
    documents = rows.seq_lengths.take(chosen)
    lengths = documents.values.astype(np.int64)
    per_row = documents.lengths
    owner = np.repeat(np.arange(len(chosen)), per_row)
    # Documents of a row lie end to end from its beginning.
    ends = offsets_of(lengths)
    starts = ends[:-1] - np.repeat(ends[documents.offsets[:-1]], per_row)
    packed_BL = rows.take_ids(chosen).reshape(-1)
    ids_NL = np.full((len(lengths), rows.length), PAD_ID, np.int32)
    to = runs(np.arange(len(lengths)) * rows.length, lengths)
    ids_NL.reshape(-1)[to] = packed_BL[runs(owner * rows.length + starts, lengths)]
    nowhere = np.zeros(len(lengths), np.int64)
    spans = clip_spans(rows.spans.take(chosen[owner]), starts, lengths, nowhere)
    one_each = Ragged(documents.values, np.arange(len(lengths) + 1))
    return RowBatch(ids_NL, one_each, spans)
