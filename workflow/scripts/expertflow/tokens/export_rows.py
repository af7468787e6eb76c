"""Export packed rows for other trainers: without padding, with labels or a mask stored.

Made for TRL's ``SFTTrainer`` with ``padding_free=True``, which derives position ids from
``seq_lengths``.
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
from expertflow.tokens.ragged import offsets_of, run_indices

Targets = Literal["labels", "completion_mask"]
Mask = NDArray[np.bool_]
# In memory at a time, besides the file's mapped pages.
BATCH_TOKENS = 1 << 20


class ExportSummary(Record, frozen=True, kw_only=True):
    n_rows: int
    n_tokens: int
    n_target_tokens: int


def export_rows(source: Path, output: Path, *, targets: Targets) -> ExportSummary:
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
            used = lengths.sum_lists()
            kept = run_indices(np.arange(len(chosen)) * rows.length, used)
            ids, values = (
                pa.ListArray.from_arrays(
                    pa.array(offsets_of(used), pa.int32()), pa.array(flat_NL.reshape(-1)[kept])
                )
                for flat_NL in (ids_NL, values_NL)
            )
            yield [ids, arrow.arrow_lists(lengths), values]

    integers = pa.list_(pa.int32())
    values = integers if targets == "labels" else pa.list_(pa.int8())
    schema = pa.schema([("input_ids", integers), ("seq_lengths", integers), (targets, values)])
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
