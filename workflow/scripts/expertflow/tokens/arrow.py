"""Read and write token shards and packed rows on disk.

A token shard is two files: ``.ids``, the ids of all its documents end to end as little-endian
int32, and ``.arrow``, an index with one row per document in file order. Packed rows are an Arrow
IPC *stream* and two small JSON files, as ``datasets.load_from_disk`` reads. A row stores ids,
document lengths and supervised spans; labels, position ids and cu_seqlens are built per batch.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expertflow.core.files import replacing
from expertflow.core.records import Record
from expertflow.tokens.ragged import Ragged, concat_ragged

IDS_DTYPE = np.dtype("<i4")
# ``dropped``: why a document has no tokens; ``special_text``: one of its texts contains a special
# token.
INDEX = pa.schema(
    [
        ("n_tokens", pa.int32()),
        ("spans", pa.list_(pa.int32())),
        ("special_text", pa.bool_()),
        ("dropped", pa.string()),
    ]
)
ROWS_FILE = "data-00000-of-00001.arrow"
# The number of each piece's held-out document, in the order of the rows.
DOCUMENTS_FILE = "documents.npy"
# Padding is never a target and in no document, so any valid id works.
PAD_ID = 0


class PackedRows(Record, frozen=True):
    """N packed rows of L tokens, in the mapped file until taken.

    ``parts_NL`` hold the rows in order; all parts but the last have equal height.
    """

    parts_NL: tuple[NDArray[np.int32], ...]
    seq_lengths: Ragged
    spans: Ragged

    @classmethod
    def from_lists(
        cls,
        input_ids_NL: NDArray[np.int32],
        seq_lengths: Iterable[Sequence[int]],
        spans: Iterable[Sequence[int]],
    ) -> "PackedRows":
        return cls((input_ids_NL,), Ragged.from_lists(seq_lengths), Ragged.from_lists(spans))

    def __len__(self) -> int:
        return len(self.seq_lengths)

    @property
    def length(self) -> int:
        return int(self.parts_NL[0].shape[1])

    def take_ids(
        self, rows: NDArray[np.integer], out: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """Copy the ids of some rows, [B, L], into ``out`` if given."""
        if out is None:
            out = np.empty((len(rows), self.length), np.int32)
        if len(self.parts_NL) == 1:
            # In its default mode, numpy buffers its writes to ``out``.
            return np.take(self.parts_NL[0], rows, axis=0, out=out, mode="clip")
        height = len(self.parts_NL[0])
        for i, row in enumerate(rows.tolist()):
            out[i] = self.parts_NL[row // height][row % height]
        return out


def index_batch(
    n_tokens: NDArray[np.integer],
    spans: Ragged,
    special_text: Sequence[bool] | NDArray[np.bool_],
    dropped: list[str | None],
) -> pa.RecordBatch:
    columns = (n_tokens, arrow_lists(spans), special_text, dropped)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, kind) for column, kind in zip(columns, INDEX.types, strict=True)],
        schema=INDEX,
    )


def read_index(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def rows_schema(length: int) -> pa.Schema:
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), length)),
            ("seq_lengths", pa.list_(pa.int32())),
            ("supervised_spans", pa.list_(pa.int32())),
        ]
    )


def write_rows(directory: Path, batches: Iterable[PackedRows], *, length: int) -> None:
    """Write batches that each have one part."""
    columns = (
        [
            pa.FixedSizeListArray.from_arrays(pa.array(batch.parts_NL[0].reshape(-1)), length),
            arrow_lists(batch.seq_lengths),
            arrow_lists(batch.spans),
        ]
        for batch in batches
    )
    write_dataset(directory, rows_schema(length), columns)


def write_dataset(directory: Path, schema: pa.Schema, batches: Iterable[list[pa.Array]]) -> None:
    """Write list columns as a folder for ``datasets.load_from_disk``."""
    features: dict[str, Any] = {}
    for field in schema:
        feature = {"dtype": str(field.type.value_type), "_type": "Value"}
        features[field.name] = {"feature": feature, "_type": "List"}
        if pa.types.is_fixed_size_list(field.type):
            features[field.name]["length"] = field.type.list_size
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, object] = {
        "_data_files": [{"filename": ROWS_FILE}],
        # Fixed, so that equal rows are equal files.
        "_fingerprint": "expertflow",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    with replacing(directory) as partial:
        partial.mkdir(parents=True)
        with (
            pa.OSFile(str(partial / ROWS_FILE), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            for columns in batches:
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        for name, value in (("dataset_info.json", info), ("state.json", state)):
            (partial / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_rows(directory: Path) -> PackedRows:
    """Map packed rows; ids are views of the file."""
    with pa.memory_map(str(directory / ROWS_FILE)) as source:
        table = pa.ipc.open_stream(source).read_all()
    length = table.schema.field("input_ids").type.list_size
    parts = [_view(chunk.flatten()).reshape(-1, length) for chunk in table["input_ids"].chunks]
    return PackedRows(
        tuple(parts) or (np.empty((0, length), np.int32),),
        from_arrow_lists(table["seq_lengths"]),
        from_arrow_lists(table["supervised_spans"]),
    )


def arrow_lists(lists: Ragged) -> pa.ListArray:
    offsets = pa.array(lists.offsets.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(lists.values, pa.int32()))


def from_arrow_lists(column: pa.ChunkedArray) -> Ragged:
    # Both handle a sliced chunk; the raw buffers do not.
    return concat_ragged(
        Ragged(_view(chunk.flatten()), _view(chunk.offsets)) for chunk in column.chunks
    )


def _view(numbers: pa.Array) -> Any:
    return np.from_dlpack(numbers)  # to_numpy would import pandas
