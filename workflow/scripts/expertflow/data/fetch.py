"""Fetch a source's records to disk and describe them."""

from pathlib import Path

from msgspec.structs import asdict, replace

from expertflow.core.errors import DataError
from expertflow.data.records import ExpertLock, SourceRecord
from expertflow.data.settings import FetchSpec
from expertflow.data.sources.registry import open_source


def fetch_source(spec: FetchSpec, lock: ExpertLock, directory: Path) -> SourceRecord:
    """Make a source readable, writing to ``directory`` if needed; DataError if it is empty."""
    pinned = next(source for source in lock.sources if source.name == spec.source.name)
    fetched = open_source(spec.source).fetch(pinned, directory)
    if all(file.n_bytes == 0 for file in fetched.files):
        raise DataError(f"source {pinned.name}: it holds no records; check its path and filters")
    if fetched.revision is None:
        fetched = replace(fetched, revision=pinned.revision)
    return SourceRecord(
        name=pinned.name,
        preset=spec.preset,
        kind=pinned.kind,
        n_shards=pinned.n_shards,
        **asdict(fetched),
    )
