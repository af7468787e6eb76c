"""Local files, by path or glob; they stay where they are."""

import glob
from contextlib import suppress
from itertools import islice
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.format import linux_path
from expertflow.core.hashes import HashCache
from expertflow.data.formats.streams import SUFFIXES, sniff_format
from expertflow.data.read import FORMATS, can_be_cut, describe_file, format_of
from expertflow.data.records import LockedFile, SourceLock
from expertflow.data.settings import ReadOptions
from expertflow.data.sources.base import DataSource, Fetched, Found, Pinned, Pins

SHARD_BYTES = 32 << 20
LARGE_SHARD_BYTES = 128 << 20
MANY_SHARDS = 16
MAX_SHARDS = 200
# Files of a folder that are looked at for an example.
MAX_LISTED = 10_000


class LocalFiles(DataSource):
    kind = "local"
    required = ("path",)
    option_type = ReadOptions

    def look_up(self) -> Found:
        paths = match_files(self.path)
        if not paths:
            return Found("missing")
        n_records = None
        if all(path.suffix.lower() == ".parquet" for path in paths):
            from expertflow.data.formats.tables import count_rows

            with suppress(DataError):
                n_records = sum(count_rows(path, "parquet") for path in paths)
        return Found("found", sum(path.stat().st_size for path in paths), n_records)

    def pin(self, pins: Pins) -> Pinned:
        files = tuple(
            LockedFile(
                path=str(path),
                format=file_format,
                compression=compression,
                n_bytes=path.stat().st_size,
                sha256=pins.hash_file(path),
            )
            for path in find_files(str(self.spec.path))
            for file_format, compression in [format_of(path)]
        )
        return Pinned(n_shards=count_shards(files), files=files)

    def fetch(self, lock: SourceLock, directory: Path) -> Fetched:
        files, hashes = [], HashCache()
        for locked in lock.files:
            path = Path(locked.path)
            if not path.is_file() or hashes.sha256(path) != locked.sha256:
                raise DataError(f"{path}: changed since the workflow started; run again")
            files.append(describe_file(path, sha256=locked.sha256, options=self.spec.options))
        return Fetched(tuple(files))


def find_files(pattern: str) -> list[Path]:
    """List a pattern's files, sorted; DataError if there are none, or one is unusable."""
    literal = Path(pattern).expanduser()
    if literal.is_dir():
        # The largest is data, rather than what describes it.
        found = (one for one in islice(literal.rglob("*"), MAX_LISTED) if one.is_file())
        data = (one for one in found if one.suffix.lower() in (*FORMATS, *SUFFIXES))
        likely = max(data, key=lambda one: one.stat().st_size, default=literal / "a.jsonl")
        example = likely.with_name(f"*{likely.suffix}")
        raise DataError(f"{pattern} is a directory; specify its files, e.g. {example}")
    paths = match_files(literal)
    if not paths:
        here = linux_path(pattern)
        fix = "correct the source's path" if here == pattern else f"in WSL it is {here}"
        raise DataError(f"no file at {pattern}; {fix}")
    for path in paths:
        if not path.is_file() or path.stat().st_size == 0:
            raise DataError(f"{path} is empty or not a regular file; fill it, or move it away")
        sniff_format(path, *format_of(path))
    return paths


def match_files(literal: Path) -> list[Path]:
    # Before it is read as a pattern: a name may contain brackets.
    if literal.exists():
        return [] if literal.is_dir() else [literal]
    found = glob.glob(str(literal), recursive=True)  # noqa: PTH207
    return sorted({Path(path) for path in found if Path(path).is_file()})


def count_shards(files: tuple[LockedFile, ...]) -> int:
    """Choose the number of jobs; starting one costs as much as preparing 10 MiB."""
    n_bytes = sum(file.n_bytes for file in files)
    # 32 MiB up to 512 MiB in total, then sixteen shards, then shards of 128 MiB.
    shard_bytes = min(max(SHARD_BYTES, -(-n_bytes // MANY_SHARDS)), LARGE_SHARD_BYTES)
    n_pieces = sum(
        -(-file.n_bytes // shard_bytes) if can_be_cut(file.format, file.compression) else 1
        for file in files
    )
    return max(1, min(MAX_SHARDS, -(-n_bytes // shard_bytes), n_pieces))
