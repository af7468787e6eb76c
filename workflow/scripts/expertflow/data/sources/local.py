"""Files on this machine, by path or glob. They stay where they are."""

import glob
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.data.formats.options import ReadOptions
from expertflow.data.formats.streams import sniff
from expertflow.data.read import can_be_cut, describe, format_of
from expertflow.data.records import LockedFile, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.kind import Fetched, Found, Pinned, Pins

SHARD_BYTES = 32 << 20
LARGE_SHARD_BYTES = 128 << 20
MANY_SHARDS = 16
MAX_SHARDS = 200


def look_up(source: SourceSpec) -> Found:
    paths = _matches(str(source.path))
    if not paths:
        return Found("missing")
    n_records = None
    if all(path.suffix == ".parquet" for path in paths):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            n_records = sum(int(pq.ParquetFile(path).metadata.num_rows) for path in paths)
        except pa.ArrowInvalid:
            n_records = None
    return Found("found", sum(path.stat().st_size for path in paths), n_records)


def pin(source: SourceSpec, pins: Pins) -> Pinned:
    ReadOptions.from_manifest(source.options)
    files = []
    for path in find_files(str(source.path)):
        file_format, compression = format_of(path)
        file = LockedFile(
            path=str(path),
            format=file_format,
            compression=compression,
            n_bytes=path.stat().st_size,
            sha256=pins.hash_file(path),
        )
        files.append(file)
    return Pinned(n_shards=count_shards(tuple(files)), files=tuple(files))


def fetch(source: SourceSpec, lock: SourceLock, directory: Path) -> Fetched:
    files = []
    for locked in lock.files:
        path = Path(locked.path)
        if not path.is_file():
            raise DataError(f"{path}: gone since the workflow started; put it back and run again")
        if sha256_file(path) != locked.sha256:
            raise DataError(f"{path}: changed since the workflow started; run again to take it in")
        files.append(describe(path, sha256=locked.sha256, options=source.options))
    return Fetched(files)


def find_files(pattern: str) -> list[Path]:
    """List the files that a source's ``path`` names, sorted; a path that exists is no pattern.

    Raises:
        DataError: nothing is there, or a file is empty, of no known format, or not what its name
            says.
    """
    literal = Path(pattern).expanduser()
    if literal.is_dir():
        raise DataError(f"{pattern} is a directory; name its files, e.g. {literal}/*.jsonl")
    paths = _matches(pattern)
    if not paths:
        raise DataError(f"no file at {pattern}; correct the source's path")
    for path in paths:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; remove it or fill it")
        sniff(path, *format_of(path))
    return paths


def _matches(pattern: str) -> list[Path]:
    literal = Path(pattern).expanduser()
    if literal.exists():
        return [] if literal.is_dir() else [literal]
    found = glob.glob(str(literal), recursive=True)  # noqa: PTH207
    return sorted({Path(path) for path in found if Path(path).is_file()})


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
