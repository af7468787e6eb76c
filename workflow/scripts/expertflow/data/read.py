"""Describe files of raw records, and read one shard of them.

A shard is a byte range of all files laid end to end, as stored on disk. A record belongs to the
shard with its first byte, so any number of shards reads each record once. JSON Lines are cut by
bytes, columnar files by rows in proportion; other files belong to the shard where they begin.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.data.formats import texts
from expertflow.data.formats.streams import SUFFIXES, open_text, sniff_format
from expertflow.data.records import Compression, DataFile, FileFormat
from expertflow.data.reject import RawRecord
from expertflow.data.settings import ReadOptions

FORMATS: dict[str, FileFormat] = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv"},
    **{".txt": "text", ".md": "text", ".text": "text"},
    **{".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"},
}


def format_of(path: Path) -> tuple[FileFormat, Compression | None]:
    # a.jsonl.gz -> .jsonl, gzip
    name = Path(path.name.lower())
    compression = SUFFIXES.get(name.suffix)
    kind = FORMATS.get(name.with_suffix("").suffix if compression else name.suffix)
    if kind is None or (compression and kind in ("parquet", "arrow")):
        known = ", ".join(FORMATS)
        raise DataError(
            f"{path} is not one of {known} (texts also with {' or '.join(SUFFIXES)}); unpack"
            " or convert it, or correct path"
        )
    return kind, compression


def can_be_cut(file_format: FileFormat, compression: Compression | None) -> bool:
    return compression is None and file_format in ("jsonl", "parquet", "arrow")


def describe_file(
    path: Path, *, sha256: str | None = None, options: dict[str, object] | None = None
) -> DataFile:
    """Inspect a raw file, counting records if that needs no parsing; DataError if unusable."""
    reading = ReadOptions.select_known(options or {})
    kind, compression = format_of(path)
    notes = sniff_format(path, kind, compression)
    n_records: int | None = None
    n_newlines: tuple[int, ...] = ()
    n_bytes = path.stat().st_size
    if kind in ("parquet", "arrow"):
        # Imported here: pyarrow takes 0.2 s, and texts do not need it.
        from expertflow.data.formats import tables

        n_records = tables.count_rows(path, kind)
    elif kind == "jsonl" and compression is None:
        n_newlines, n_records = texts.count_lines(path)
    # Found before the run: a file is one record by default.
    elif kind == "text" and reading.text_records == "file" and n_bytes > texts.MAX_RECORD_BYTES:
        raise texts.too_long(str(path))
    file = DataFile(
        path=str(path),
        format=kind,
        compression=compression,
        n_bytes=n_bytes,
        n_records=n_records,
        sha256=sha256 or sha256_file(path),
        n_newlines=n_newlines,
        notes=notes,
    )
    if kind in ("csv", "tsv"):
        with open_text(path, compression) as stream:
            # A missing header, or a repeated name in it, stops the run before any work.
            texts.read_header(stream, file, reading)
    return file


def iter_shard(
    files: tuple[DataFile, ...],
    *,
    index: int,
    n_shards: int,
    options: dict[str, object] | None = None,
) -> Iterator[RawRecord]:
    """Yield a shard's records in file order; DataError if one is cut off, or changed."""
    reading = ReadOptions.select_known(options or {})
    total = sum(file.n_bytes for file in files)
    # Integers: shards meet without a gap, however many there are.
    start, stop = total * index // n_shards, total * (index + 1) // n_shards
    offset = 0
    for file in files:
        low, high = max(start - offset, 0), min(stop - offset, file.n_bytes)
        offset += file.n_bytes
        if low >= high:
            continue
        # A missing file is reported where it is opened.
        with suppress(OSError):
            if Path(file.path).stat().st_size != file.n_bytes:
                raise texts.reject_changed_file(file)
        if not can_be_cut(file.format, file.compression):
            # The shard with the first byte reads all of it.
            if low == 0:
                with open_text(Path(file.path), file.compression) as stream:
                    yield from texts.iter_all(stream, file, reading)
        elif file.format == "jsonl":
            yield from texts.iter_range(file, low, high)
        else:
            from expertflow.data.formats import tables

            yield from tables.iter_range(file, low, high)
