"""Export packed rows for other trainers, with labels or a mask stored.

Made for TRL's ``SFTTrainer`` with ``padding_free=True``, which derives position ids from
``seq_lengths`` and expects these to cover the row: padding is listed as one more document.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.records import Record
from expertflow.tokens import arrow
from expertflow.tokens.packing import IGNORE
from expertflow.tokens.ragged import Ragged, offsets_of, run_indices

Targets = Literal["labels", "completion_mask"]
Mask = NDArray[np.bool_]
# In memory at a time, besides the file's mapped pages.
BATCH_TOKENS = 1 << 20


class ExportSummary(Record, frozen=True, kw_only=True):
    n_rows: int
    n_tokens: int
    n_target_tokens: int


def export_rows(source: Path, output: Path, *, targets: Targets, padded: bool) -> ExportSummary:
    _check(source, output)
    rows = arrow.read_rows(source)
    counts = np.zeros(2, np.int64)

    def batches() -> Iterator[list[pa.Array]]:
        height = max(1, BATCH_TOKENS // rows.length)
        for start in range(0, len(rows), height):
            chosen = np.arange(start, min(start + height, len(rows)))
            ids_NL, lengths = rows.take_ids(chosen), rows.seq_lengths.take(chosen)
            target_NL = target_mask(rows, chosen)
            # Complete only when ``write_dataset`` has taken all batches.
            counts[:] += lengths.values.sum(), target_NL.sum()
            if targets == "labels":
                values_NL = np.where(target_NL, ids_NL, np.int32(IGNORE))
            else:
                # Arrow would turn a mask into booleans, but the schema has int8.
                values_NL = target_NL.astype(np.int8)
            yield _columns(ids_NL, values_NL, lengths, padded=padded)

    # -1 is Arrow's size for variable-length lists.
    size = rows.length if padded else -1
    values = pa.list_(pa.int32() if targets == "labels" else pa.int8(), size)
    ids, lengths = pa.list_(pa.int32(), size), pa.list_(pa.int32())
    schema = pa.schema([("input_ids", ids), ("seq_lengths", lengths), (targets, values)])
    arrow.write_dataset(output, schema, batches())
    n_tokens, n_targets = counts.tolist()
    return ExportSummary(n_rows=len(rows), n_tokens=n_tokens, n_target_tokens=n_targets)


def target_mask(rows: arrow.PackedRows, chosen: NDArray[np.integer]) -> Mask:
    """Return the [B, L] target mask: in a supervised span, not first in a document."""
    length = rows.length
    mask = np.zeros(len(chosen) * length, np.bool_)
    spans = rows.spans.take(chosen)
    # Spans are pairs, so both bounds of a span are in the same row.
    bounds = spans.values + np.repeat(np.arange(len(chosen)) * length, spans.lengths)
    mask[run_indices(bounds[::2], bounds[1::2] - bounds[::2])] = True
    lengths = rows.seq_lengths.take(chosen)
    # Documents start where the previous ones end, shifted by the padding of earlier rows.
    padding = offsets_of(length - lengths.sum_lists())[:-1]
    mask[offsets_of(lengths.values)[:-1] + np.repeat(padding, lengths.lengths)] = False
    return mask.reshape(len(chosen), length)


def _columns(
    ids_NL: NDArray[np.int32], values_NL: NDArray[np.integer], lengths: Ragged, *, padded: bool
) -> list[pa.Array]:
    n_rows, length = ids_NL.shape
    used = lengths.sum_lists()
    ids, values = ids_NL.reshape(-1), values_NL.reshape(-1)
    if padded:
        lists = [pa.FixedSizeListArray.from_arrays(pa.array(v), length) for v in (ids, values)]
        # A row's padding, if any, is its last document.
        padding = length - used
        at = np.flatnonzero(padding)
        # Inserted after the row's documents: before the index where those of the next row start.
        listed = np.insert(lengths.values, lengths.offsets[at + 1], padding[at])
        lengths = Ragged(listed, offsets_of(lengths.lengths + (padding > 0)))
    else:
        kept = run_indices(np.arange(n_rows) * length, used)
        offsets = pa.array(offsets_of(used), pa.int32())
        lists = [pa.ListArray.from_arrays(offsets, pa.array(v[kept])) for v in (ids, values)]
    return [lists[0], arrow.arrow_lists(lengths), lists[1]]


def _check(source: Path, output: Path) -> None:
    file = source / arrow.ROWS_FILE
    if not file.is_file():
        raise DataError(f"{source}: has no {file.name}; choose a packed split, e.g. packed/train")
    with pa.memory_map(str(file)) as stream:
        try:
            names = pa.ipc.open_stream(stream).schema.names
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: not an Arrow stream ({error}); repack the rows") from error
    if names != arrow.rows_schema(1).names:
        raise DataError(f"{source}: columns {names} are not those of packed rows; choose another")
    if output.exists() or output.is_symlink():
        raise DataError(f"{output}: already exists; delete it or choose another folder")
