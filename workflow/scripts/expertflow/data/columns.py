"""Flat arrays for deduplication: 23 to 31 bytes per document."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.data.documents import iter_batches
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
    places: dict[str, int] = {}
    for shard, here, batch in _iter_rows(shards, "text_hash", "group_hash", "category"):
        columns.source[here] = columns.sources.index(shard.source)
        hashes = _fixed(batch.column("text_hash"), np.dtype("<u8"))
        # 16 bytes as two halves: numpy has no 128-bit integers.
        columns.text[here], columns.text_rest[here] = hashes.T
        columns.group[here] = batch.column("group_hash").to_numpy()
        # Each name once per batch, not once per document.
        names = batch.column("category").dictionary_encode(null_encoding="encode")
        numbers = [
            NO_CATEGORY if name is None else places.setdefault(name, len(places))
            for name in names.dictionary.to_pylist()
        ]
        columns.category[here] = np.array(numbers, np.int32)[names.indices.to_numpy()]
    columns.categories = list(places)
    return columns


def read_signatures(shards: list[ShardRecord], columns: Columns) -> Iterator[NDArray[np.uint32]]:
    for _, here, batch in _iter_rows(shards, "signature"):
        yield _fixed(batch.column("signature"), np.dtype("<u4"))[columns.status[here] == KEPT]


def read_document_ids(shards: list[ShardRecord], rows: set[int]) -> dict[int, str]:
    names: dict[int, str] = {}
    for shard, part in row_ranges(shards):
        if own := rows.intersection(range(part.start, part.stop)):
            ids = pa.Table.from_batches(iter_batches(shard.path, ("document_id",)))[0]
            names |= {row: ids[row - part.start].as_py() for row in own}
    return names


def row_ranges(shards: list[ShardRecord]) -> list[tuple[ShardRecord, slice]]:
    ends = np.cumsum([0, *(shard.n_documents for shard in shards)]).tolist()
    return [(shard, slice(*pair)) for shard, pair in zip(shards, pairwise(ends), strict=True)]


def _iter_rows(
    shards: list[ShardRecord], *names: str
) -> Iterator[tuple[ShardRecord, slice, pa.RecordBatch]]:
    for shard, part in row_ranges(shards):
        row = part.start
        for batch in iter_batches(shard.path, names):
            here = slice(row, row + batch.num_rows)
            row = here.stop
            if row > part.stop:
                break
            yield shard, here, batch
        if row != part.stop:
            raise DataError(
                f"{shard.path}: does not have the {shard.n_documents} documents that its record"
                " states; delete it to prepare it again"
            )


def _fixed(column: pa.Array, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    n_values = column.type.byte_width // dtype.itemsize
    # [n, values], a view without a copy; the offset of a sliced column is in rows.
    values = np.frombuffer(column.buffers()[1], dtype).reshape(-1, n_values)
    return values[column.offset : column.offset + len(column)]


def find_buckets(keys: Hashes, more: Hashes | None = None) -> tuple[Rows, Rows]:
    """Return the rows whose keys occur more than once, and the first row of each one's bucket.

    A bucket's rows are adjacent and ascending. With ``more``, both keys must be equal.
    """
    # Sorting keys alone is fast; few of them occur twice and need a stable sort.
    order = np.argsort(keys)
    same = np.diff(keys[order]) == 0
    twice = np.zeros(len(keys), bool)
    # Both neighbors of an equal pair.
    twice[order[1:][same]] = True
    twice[order[:-1][same]] = True
    rows = np.flatnonzero(twice)
    # np.lexsort sorts by its last key first.
    columns = [keys[rows]] if more is None else [more[rows], keys[rows]]
    order = np.lexsort(columns)
    rows = rows[order]
    new = np.zeros(len(rows), bool)
    new[:1] = True
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    starts = np.flatnonzero(new)
    sizes = np.diff(starts, append=len(rows))
    shared = np.repeat(sizes > 1, sizes)
    return rows[shared], np.repeat(rows[starts], sizes)[shared]
