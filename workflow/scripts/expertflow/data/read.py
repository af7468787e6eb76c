"""Read one shard's share of a source's raw records.

The corpus is all files laid end to end in bytes, as they are on disk; a shard is a range of it. A
record belongs to the shard in which its first byte lies, so any number of shards reads every record
exactly once. JSON Lines are cut by bytes, columnar files by rows in proportion; a file that cannot
be cut belongs whole to the shard where it begins.
"""

from collections.abc import Callable, Iterator
from typing import Any

from expertflow.data.formats import delimited, json_values, lines, tables
from expertflow.data.formats.options import ReadOptions
from expertflow.data.records import Compression, DataFile, FileFormat
from expertflow.data.reject import RawRecord

BLOCK_BYTES = 16 << 20
# Of files that belong whole to one shard.
READERS: dict[FileFormat, Callable[..., Iterator[RawRecord]]] = {
    "jsonl": lines.iter_all,
    "json": json_values.iter_all,
    "text": lines.iter_texts,
    "csv": delimited.iter_all,
    "tsv": delimited.iter_all,
}


def can_be_cut(file_format: FileFormat, compression: Compression | None) -> bool:
    """Say whether several shards can share a file."""
    return compression is None and file_format in ("jsonl", "parquet", "arrow")


def iter_shard(
    files: tuple[DataFile, ...],
    *,
    index: int,
    n_shards: int,
    options: dict[str, Any] | None = None,
) -> Iterator[RawRecord]:
    """Yield the records of one shard in the order of the files.

    Of a source's ``options`` those about reading count; those of a local source are checked where
    its lock is taken.

    Raises:
        DataError: a file cannot be read to its end.
    """
    reading = ReadOptions.among(options or {})
    total = sum(file.n_bytes for file in files)
    start, stop = total * index // n_shards, total * (index + 1) // n_shards
    offset = 0
    for file in files:
        low, high = max(start - offset, 0), min(stop - offset, file.n_bytes)
        offset += file.n_bytes
        if low >= high:
            continue
        if not can_be_cut(file.format, file.compression):
            if low == 0:
                yield from READERS[file.format](file, options=reading)
        elif file.format == "jsonl":
            yield from lines.iter_range(file, low, high, options=reading, block_bytes=BLOCK_BYTES)
        else:
            yield from tables.iter_range(file, low, high)
