"""Files on this machine, by path or glob: which there are, and what is in them."""

import glob
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.formats import delimited, lines, tables
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import SUFFIXES, sniff
from expertflow.data.read import BLOCK_BYTES, can_be_cut
from expertflow.data.records import Compression, DataFile, FileFormat, LockedFile

SHARD_BYTES = 32 << 20
LARGE_SHARD_BYTES = 128 << 20
MANY_SHARDS = 16
MAX_SHARDS = 200
FORMATS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".md": "text",
    ".text": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


def find_files(pattern: str, *, source: str) -> list[Path]:
    """List the files that a source's ``path`` names, sorted; a path that exists is no pattern.

    Raises:
        DataError: nothing is there, or a file is empty, of no known format, or not what its name
            says.
    """
    literal = Path(pattern).expanduser()
    if literal.is_dir():
        raise DataError(
            f"source {source}: {pattern} is a directory; name its files, e.g. {literal}/*.jsonl"
        )
    paths = [literal]
    if not literal.exists():
        found = glob.glob(str(literal), recursive=True)  # noqa: PTH207
        paths = sorted({Path(path) for path in found if Path(path).is_file()})
    if not paths:
        raise DataError(f"source {source}: no file at {pattern}; correct the source's path")
    for path in paths:
        try:
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty; remove it or fill it")
            sniff(path, *format_of(path))
        except DataError as error:
            raise DataError(f"source {source}: {error}") from error
    return paths


def format_of(path: Path) -> tuple[FileFormat, Compression | None]:
    """Tell format and compression from a file's name.

    Raises:
        DataError: the name ends in no known way.
    """
    name = Path(path.name.lower())
    compression = SUFFIXES.get(name.suffix)
    kind = FORMATS.get(name.with_suffix("").suffix if compression else name.suffix)
    if kind is None or (compression and kind in ("parquet", "arrow")):
        known = ", ".join(FORMATS)
        raise DataError(
            f"{path} is none of {known} (texts also with {' or '.join(SUFFIXES)}); convert it, or"
            " correct path"
        )
    return kind, compression


def count_shards(files: tuple[LockedFile, ...]) -> int:
    """Choose how many jobs prepare these files, none of them without work.

    A job takes 32 MiB until there are 16, then more, up to 128 MiB: starting one costs as much as
    preparing 10 MiB.
    """
    n_bytes = sum(file.n_bytes for file in files)
    shard_bytes = min(max(SHARD_BYTES, -(-n_bytes // MANY_SHARDS)), LARGE_SHARD_BYTES)
    n_pieces = sum(
        -(-file.n_bytes // shard_bytes) if can_be_cut(file.format, file.compression) else 1
        for file in files
    )
    return max(1, min(MAX_SHARDS, -(-n_bytes // shard_bytes), n_pieces))


def describe(path: Path, *, sha256: str, options: dict[str, Any]) -> DataFile:
    """Look into a raw file; records are counted where that costs no parsing.

    Raises:
        DataError: it cannot be opened as what its name says.
    """
    reading = ReadOptions.among(options)
    kind, compression = format_of(path)
    notes = sniff(path, kind, compression)
    n_records: int | None = None
    n_newlines: tuple[int, ...] = ()
    n_bytes = path.stat().st_size
    if kind in ("parquet", "arrow"):
        n_records = tables.count_rows(path, kind)
    elif kind == "jsonl" and compression is None:
        n_newlines, n_records = lines.count_lines(path, BLOCK_BYTES)
    elif kind == "text" and reading.text_records == "file" and n_bytes > MAX_RECORD_BYTES:
        raise lines.too_long(path)
    file = DataFile(
        path=str(path),
        format=kind,
        compression=compression,
        n_bytes=n_bytes,
        n_records=n_records,
        sha256=sha256,
        n_newlines=n_newlines,
        notes=notes,
    )
    if kind in ("csv", "tsv"):
        delimited.check_header(file, options=reading)
    return file
