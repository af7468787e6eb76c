"""Flat arrays for deduplication: 23 to 31 bytes per document."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.data.records import ShardRecord
from expertflow.data.shingles import Hashes

# A document's outcome; ``Columns.status`` is an index into this tuple.
STATUS = (
    *("kept", "duplicate", "near_duplicate", "over_source_cap", "over_category_cap"),
    *("below_weight", "over_max_documents"),
)
KEPT = 0
NO_CATEGORY = -1
Rows = NDArray[np.int64]
# Rows sorted at once. Keys are hashes, so equal key ranges hold about equally many rows.
PASS_ROWS = 1 << 20
SCAN_ROWS = 1 << 20


class Columns(Struct, kw_only=True):
    """One entry per document, in manifest order.

    ``text``, ``text_rest`` are halves of ``text_hash``; ``source``, ``category`` index the names.
    """

    text: Hashes
    text_rest: Hashes
    group: Hashes
    category: NDArray[np.int32]
    source: NDArray[np.uint16]
    status: NDArray[np.uint8]
    sources: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)

    def drop(self, rows: Rows, reason: str) -> None:
        self.status[rows] = STATUS.index(reason)


def read_columns(shards: list[ShardRecord]) -> Columns:
    """Read the shards' columns in manifest order; DataError if a shard's count differs."""
    n = sum(shard.n_documents for shard in shards)
    columns = Columns(
        text=np.empty(n, np.uint64),
        text_rest=np.empty(n, np.uint64),
        group=np.empty(n, np.uint64),
        category=np.empty(n, np.int32),
        source=np.empty(n, np.uint16),
        status=np.zeros(n, np.uint8),
        sources=list(dict.fromkeys(shard.source for shard in shards)),
    )
    for shard, part in placed(shards):
        columns.source[part] = columns.sources.index(shard.source)
    places: dict[str, int] = {}
    for here, batch in _batches(placed(shards), "text_hash", "group_hash", "category"):
        hashes = _fixed(batch.column("text_hash"), np.dtype("<u8"))
        columns.text[here], columns.text_rest[here] = hashes.T
        columns.group[here] = batch.column("group_hash").to_numpy()
        columns.category[here] = _category_places(batch.column("category"), places)
    columns.categories = list(places)
    return columns


def placed(shards: list[ShardRecord]) -> list[tuple[ShardRecord, slice]]:
    ends = np.cumsum([0, *(shard.n_documents for shard in shards)]).tolist()
    return [(shard, slice(*pair)) for shard, pair in zip(shards, pairwise(ends), strict=True)]


def read_signatures(shards: list[ShardRecord], columns: Columns) -> Iterator[NDArray[np.uint32]]:
    for here, batch in _batches(placed(shards), "signature"):
        yield _fixed(batch.column("signature"), np.dtype("<u4"))[columns.status[here] == KEPT]


def read_document_ids(shards: list[ShardRecord], rows: Iterable[int]) -> dict[int, str]:
    wanted = set(rows)
    places = [
        (shard, part)
        for shard, part in placed(shards)
        if any(part.start <= row < part.stop for row in wanted)
    ]
    names: dict[int, str] = {}
    for here, batch in _batches(places, "document_id"):
        found = [row for row in wanted if here.start <= row < here.stop]
        names |= {row: batch.column("document_id")[row - here.start].as_py() for row in found}
    return names


def _batches(
    places: list[tuple[ShardRecord, slice]], *names: str
) -> Iterator[tuple[slice, pa.RecordBatch]]:
    for shard, part in places:
        with pa.memory_map(shard.path) as source:
            schema = pa.ipc.open_stream(source).schema
        wanted = [schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        row = part.start
        with pa.memory_map(shard.path) as source:
            for batch in pa.ipc.open_stream(source, options=options):
                here = slice(row, row + batch.num_rows)
                row = here.stop
                if row > part.stop:
                    break
                if batch.num_rows:
                    yield here, batch
        if row != part.stop:
            raise DataError(
                f"{shard.path}: not the {shard.n_documents} documents that its record tells of;"
                " delete it, so that it is prepared again"
            )


def _fixed(column: pa.Array, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    n_values = column.type.byte_width // dtype.itemsize
    values = np.frombuffer(column.buffers()[1], dtype).reshape(-1, n_values)
    return values[column.offset : column.offset + len(column)]


def _category_places(column: pa.Array, places: dict[str, int]) -> NDArray[np.int32]:
    encoded = column.dictionary_encode(null_encoding="encode")
    names = encoded.dictionary.to_pylist()
    numbers = [NO_CATEGORY if n is None else places.setdefault(n, len(places)) for n in names]
    result: NDArray[np.int32] = np.array(numbers, np.int32)[encoded.indices.to_numpy()]
    return result


def buckets(keys: Hashes, more: Hashes | None = None) -> Iterator[tuple[Rows, Rows]]:
    """Yield (rows, first row of their bucket) for keys that occur more than once.

    A bucket's rows are adjacent and ascending. With ``more``, both keys must be equal.
    """
    for every in _passes(keys):
        rows = every[_shared(keys[every])]
        columns = [keys[rows]] if more is None else [more[rows], keys[rows]]
        order = np.lexsort(columns)  # stable: rows keep their order
        rows = rows[order]
        new = np.zeros(len(rows), bool)
        new[:1] = True
        for column in columns:
            ordered = column[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        starts = np.flatnonzero(new)
        sizes = np.diff(starts, append=len(rows))
        shared = np.repeat(sizes > 1, sizes)
        yield rows[shared], np.repeat(rows[starts], sizes)[shared]


def _shared(values: Hashes) -> NDArray[np.bool_]:
    order = np.argsort(values)
    ordered = values[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(values), bool)
    shared[order[1:][same]] = True
    shared[order[:-1][same]] = True
    return shared


def _passes(keys: Hashes) -> Iterator[Rows]:
    n_bits = (len(keys) // PASS_ROWS).bit_length()
    if n_bits == 0:
        yield np.arange(len(keys))
        return
    for part in range(1 << n_bits):
        found = []
        for start in range(0, len(keys), SCAN_ROWS):
            here = keys[start : start + SCAN_ROWS] >> np.uint64(64 - n_bits) == part
            found.append(np.flatnonzero(here) + start)
        yield np.concatenate(found)
