"""Files on this machine: JSON Lines or Parquet, by path or glob."""

import glob
from pathlib import Path

import pyarrow.parquet as pq

from expertflow.core.errors import DataError
from expertflow.data.records import DataFile, FileFormat, LockedFile

SHARD_BYTES = 64 << 20
MAX_SHARDS = 200
FORMATS: dict[str, FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}


def find_files(pattern: str, *, source: str) -> list[Path]:
    """List the files that a source's ``path`` names, sorted.

    Raises:
        DataError: nothing is there, a file is empty, or its format is not read.
    """
    literal = Path(pattern).expanduser()
    paths = [literal] if literal.exists() else sorted(map(Path, glob.glob(str(literal))))  # noqa: PTH207
    if not paths:
        raise DataError(f"source {source}: no file at {pattern}; correct the source's path")
    for path in paths:
        if path.suffix not in FORMATS or path.is_dir():
            known = " or ".join(FORMATS)
            raise DataError(f"source {source}: {path} is not {known}; convert it, or correct path")
        if path.stat().st_size == 0:
            raise DataError(f"source {source}: {path} is empty; remove it or fill it")
    return paths


def count_shards(files: tuple[LockedFile, ...]) -> int:
    """Choose how many jobs prepare these files: one per 64 MiB, at most 200."""
    n_bytes = sum(file.n_bytes for file in files)
    return max(1, min(MAX_SHARDS, -(-n_bytes // SHARD_BYTES)))


def data_file(path: Path, *, sha256: str) -> DataFile:
    """Describe a raw file; rows are counted where the format knows them without reading all."""
    kind = FORMATS[path.suffix]
    n_records = pq.ParquetFile(path).metadata.num_rows if kind == "parquet" else None
    return DataFile(
        path=str(path),
        format=kind,
        n_bytes=path.stat().st_size,
        n_records=n_records,
        sha256=sha256,
    )
