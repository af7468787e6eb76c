"""Arrow layouts of token shards and packed rows, written and read in one place.

Packed rows are an Arrow IPC *stream* beside two small JSON files: the folder layout that
``datasets.load_from_disk`` reads. A row stores what cannot be derived: ids, the lengths of its
documents, and the supervised spans. Labels, position ids and cu_seqlens are made at batch time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from expertflow.core.files import replacing

TOKENS = pa.schema(
    [
        ("row", pa.int32()),
        ("held_out", pa.bool_()),
        ("ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
    ]
)
ROWS_FILE = "data-00000-of-00001.arrow"
BATCH_ROWS = 1024
# Padding is never a target and belongs to no document, so any valid id serves.
PAD_ID = 0


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row: ids without padding, document lengths that add up to them, supervised spans."""

    input_ids: np.ndarray
    seq_lengths: list[int]
    spans: list[int]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed rows in memory (mapped): ids [N rows, L tokens], lengths, spans."""

    input_ids_NL: np.ndarray
    seq_lengths: list[list[int]]
    spans: list[list[int]]

    def __len__(self) -> int:
        return len(self.seq_lengths)


def rows_schema(length: int) -> pa.Schema:
    """Give the layout of packed rows of ``length`` tokens."""
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), length)),
            ("seq_lengths", pa.list_(pa.int32())),
            ("supervised_spans", pa.list_(pa.int32())),
        ]
    )


def write_rows(directory: Path, rows: Iterator[PackedRow], *, length: int) -> None:
    """Write packed rows as a folder that ``datasets.load_from_disk`` reads."""
    schema = rows_schema(length)
    with replacing(directory) as partial:
        partial.mkdir(parents=True)
        with (
            pa.OSFile(str(partial / ROWS_FILE), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            for batch in _batches(rows, BATCH_ROWS):
                writer.write_batch(_record_batch(batch, schema, length=length))
        _write_dataset_files(partial, length)


def read_rows(directory: Path) -> PackedRows:
    """Map packed rows; the ids are a view of the file, not a copy."""
    with pa.memory_map(str(directory / ROWS_FILE)) as source:
        table = pa.ipc.open_stream(source).read_all()
    length = table.schema.field("input_ids").type.list_size
    chunks = [
        chunk.flatten().to_numpy(zero_copy_only=True).reshape(-1, length)
        for chunk in table["input_ids"].chunks
    ]
    ids = np.concatenate(chunks) if len(chunks) != 1 else chunks[0]
    return PackedRows(ids, table["seq_lengths"].to_pylist(), table["supervised_spans"].to_pylist())


def _batches(rows: Iterator[PackedRow], size: int) -> Iterator[list[PackedRow]]:
    batch: list[PackedRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _record_batch(rows: list[PackedRow], schema: pa.Schema, *, length: int) -> pa.RecordBatch:
    ids = np.full((len(rows), length), PAD_ID, dtype=np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = row.input_ids
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(ids.reshape(-1)), length),
        pa.array([row.seq_lengths for row in rows], pa.list_(pa.int32())),
        pa.array([row.spans for row in rows], pa.list_(pa.int32())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _write_dataset_files(directory: Path, length: int) -> None:
    """Add what ``datasets`` expects beside the rows: which files there are, and their features."""
    int32 = {"dtype": "int32", "_type": "Value"}
    features = {
        "input_ids": {"feature": int32, "length": length, "_type": "List"},
        "seq_lengths": {"feature": int32, "_type": "List"},
        "supervised_spans": {"feature": int32, "_type": "List"},
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": ROWS_FILE}],
        "_fingerprint": "expertflow",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, value in (("dataset_info.json", info), ("state.json", state)):
        (directory / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
