"""Lay out packed rows as other trainers read them: with labels or a mask, made once and stored.

Made for TRL's ``SFTTrainer`` with ``padding_free=True``. Its collator lays the rows of a batch end
to end and derives position ids, and from them the bounds of documents, from ``seq_lengths``. It
takes these to cover the whole row: where padding stays, it is listed as one more document.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.records import Record
from expertflow.tokens.arrow import (
    ROWS_FILE,
    PackedRows,
    arrow_lists,
    read_rows,
    rows_schema,
    write_dataset,
)
from expertflow.tokens.ragged import Ragged, offsets_of, runs
from expertflow.tokens.targets import IGNORE

Targets = Literal["labels", "completion_mask"]
Mask = NDArray[np.bool_]
# Held at a time, besides the file's pages that the system maps and drops as it likes.
BATCH_TOKENS = 1 << 20


class TakenAway(Record, frozen=True, kw_only=True):
    """What was written."""

    n_rows: int
    n_tokens: int
    n_target_tokens: int


def take_away(source: Path, output: Path, *, targets: Targets, padded: bool) -> TakenAway:
    """Write packed rows as a folder for other trainers, in flat memory.

    Raises:
        DataError: ``source`` holds no packed rows, or ``output`` is there already.
    """
    _check(source, output)
    rows = read_rows(source)
    counts = np.zeros(2, np.int64)

    def batches() -> Iterator[list[pa.Array]]:
        height = max(1, BATCH_TOKENS // rows.length)
        for start in range(0, len(rows), height):
            chosen = np.arange(start, min(start + height, len(rows)))
            ids_NL, lengths = rows.take_ids(chosen), rows.seq_lengths.take(chosen)
            target_NL = supervised(rows, chosen)
            counts[:] += lengths.values.sum(), target_NL.sum()
            yield _columns(
                ids_NL, _target_values(ids_NL, target_NL, targets), lengths, padded=padded
            )

    write_dataset(output, _schema(rows.length, targets, padded=padded), batches())
    n_tokens, n_targets = counts.tolist()
    return TakenAway(n_rows=len(rows), n_tokens=n_tokens, n_target_tokens=n_targets)


def supervised(rows: PackedRows, chosen: NDArray[np.integer]) -> Mask:
    """Give the [B, L] mask of targets: in a supervised span, not first in a document."""
    length = rows.length
    mask = np.zeros(len(chosen) * length, np.bool_)
    spans = rows.spans.take(chosen)
    # Spans are pairs, so the bounds of one span never lie in two rows.
    bounds = spans.values + np.repeat(np.arange(len(chosen)) * length, spans.lengths)
    mask[runs(bounds[::2], bounds[1::2] - bounds[::2])] = True
    lengths = rows.seq_lengths.take(chosen)
    mask[_first_tokens(lengths, length)] = False
    return mask.reshape(len(chosen), length)


def _first_tokens(lengths: Ragged, length: int) -> NDArray[np.int64]:
    """Find where documents begin in rows of ``length`` tokens laid end to end."""
    begins = offsets_of(lengths.values)[:-1]
    # Rows are full where they lie and not where their documents are counted: shift by the padding.
    padding = length - lengths.sums()
    return np.asarray(begins + np.repeat(offsets_of(padding)[:-1], lengths.lengths))


def _target_values(
    ids_NL: NDArray[np.int32], target_NL: Mask, targets: Targets
) -> NDArray[np.integer]:
    if targets == "labels":
        return np.where(target_NL, ids_NL, np.int32(IGNORE))
    return target_NL.astype(np.int8)


def _columns(
    ids_NL: NDArray[np.int32], values_NL: NDArray[np.integer], lengths: Ragged, *, padded: bool
) -> list[pa.Array]:
    n_rows, length = ids_NL.shape
    used = lengths.sums()
    ids, values = ids_NL.reshape(-1), values_NL.reshape(-1)
    if padded:
        lists = [pa.FixedSizeListArray.from_arrays(pa.array(v), length) for v in (ids, values)]
        lengths = _with_padding(lengths, length - used)
    else:
        kept = runs(np.arange(n_rows) * length, used)
        offsets = pa.array(offsets_of(used), pa.int32())
        lists = [pa.ListArray.from_arrays(offsets, pa.array(v[kept])) for v in (ids, values)]
    return [lists[0], arrow_lists(lengths), lists[1]]


def _with_padding(lengths: Ragged, padding: NDArray[np.int64]) -> Ragged:
    """Add the padding of each row, where it has any, as its last document."""
    padded = np.flatnonzero(padding)
    values = np.insert(lengths.values, lengths.offsets[padded + 1], padding[padded])
    return Ragged(values, offsets_of(lengths.lengths + (padding > 0)))


def _schema(length: int, targets: Targets, *, padded: bool) -> pa.Schema:
    size = length if padded else -1
    kind = pa.int32() if targets == "labels" else pa.int8()
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), size)),
            ("seq_lengths", pa.list_(pa.int32())),
            (targets, pa.list_(kind, size)),
        ]
    )


def _check(source: Path, output: Path) -> None:
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; name a packed split, e.g. packed/train")
    file = source / ROWS_FILE
    if not file.is_file():
        raise DataError(f"{source}: no {ROWS_FILE} in it; name a packed split, e.g. packed/train")
    with pa.memory_map(str(file)) as stream:
        try:
            names = pa.ipc.open_stream(stream).schema.names
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: no Arrow stream ({error}); pack the rows again") from error
    if names != rows_schema(1).names:
        raise DataError(f"{source}: columns {names} are not those of packed rows; name another")
    if output.exists() or output.is_symlink():
        raise DataError(f"{output}: there already; delete it or name another folder")
