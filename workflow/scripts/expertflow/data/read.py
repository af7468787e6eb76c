"""Read one shard's share of a source's raw records.

A shard of JSONL files is a range of bytes over all files laid end to end; a record belongs to the
shard in which its first byte lies, so any number of shards reads every record exactly once. Lines
end at byte 0x0A only: ``str.splitlines`` would also break at U+2028, U+2029 and U+0085, which are
legal inside JSON strings. A shard of columnar files is a range of rows.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from expertflow.core.errors import DataError
from expertflow.data.records import DataFile

BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRecord:
    """A raw item and where it stands. ``value`` is null when the line could not be read."""

    path: str
    position: int
    value: dict[str, Any] | None
    problem: str | None = None

    @property
    def where(self) -> str:
        """Name the place for a message: file and byte (JSONL) or row."""
        return f"{self.path}:{self.position}"


def share(total: int, *, index: int, n_shards: int) -> tuple[int, int]:
    """Give the half-open range of ``total`` that falls to part ``index``.

    >>> [share(10, index=i, n_shards=3) for i in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return total * index // n_shards, total * (index + 1) // n_shards


def iter_shard(files: tuple[DataFile, ...], *, index: int, n_shards: int) -> Iterator[RawRecord]:
    """Yield the records of one shard in the order of the files."""
    if not files:
        return
    columnar = files[0].format != "jsonl"
    sizes = [_n_rows(file) if columnar else file.n_bytes for file in files]
    start, stop = share(sum(sizes), index=index, n_shards=n_shards)
    offset = 0
    for file, size in zip(files, sizes, strict=True):
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            yield from (_iter_rows if columnar else _iter_lines)(file, low, high)
        offset += size


def _iter_lines(file: DataFile, low: int, high: int) -> Iterator[RawRecord]:
    """Yield the lines whose first byte lies in [low, high)."""
    with Path(file.path).open("rb") as stream:
        if low > 0:
            stream.seek(low - 1)
            stream.readline()
        position = stream.tell()
        while position < high and (line := stream.readline()):
            if line.strip():
                yield _parse_line(file.path, position, line)
            position = stream.tell()


def _parse_line(path: str, position: int, line: bytes) -> RawRecord:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return RawRecord(path=path, position=position, value=None, problem="not_utf8")
    except (ValueError, RecursionError):
        return RawRecord(path=path, position=position, value=None, problem="not_json")
    if not isinstance(value, dict):
        return RawRecord(path=path, position=position, value=None, problem="not_an_object")
    return RawRecord(path=path, position=position, value=value)


def _iter_rows(file: DataFile, low: int, high: int) -> Iterator[RawRecord]:
    position = 0
    for batch in _batches(file):
        first, last = max(low - position, 0), min(high - position, batch.num_rows)
        if first < last:
            rows = batch.slice(first, last - first).to_pylist()
            for row, value in enumerate(rows, start=position + first):
                yield RawRecord(path=file.path, position=row, value=value)
        position += batch.num_rows
        if position >= high:
            return


def _batches(file: DataFile) -> Iterable[pa.RecordBatch]:
    if file.format == "parquet":
        yield from pq.ParquetFile(file.path).iter_batches(BATCH_ROWS)
    else:
        with pa.memory_map(file.path) as source:
            yield from pa.ipc.open_stream(source)


def _n_rows(file: DataFile) -> int:
    if file.n_records is None:
        raise DataError(f"{file.path}: the number of rows is unknown; run fetch_source again")
    return file.n_records
