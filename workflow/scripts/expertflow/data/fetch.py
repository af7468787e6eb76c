"""Fetch a source's records to disk and describe them."""

from difflib import get_close_matches
from pathlib import Path

from msgspec.structs import asdict, replace

from expertflow.core.errors import ConfigError, DataError
from expertflow.data.records import ExpertLock, SourceRecord
from expertflow.data.settings import FetchSpec, SourceSpec
from expertflow.data.sources.kind import SourceModule

KINDS = ("local", "hub", "git", "generated")


def kind_of(source: SourceSpec) -> SourceModule:
    """Return the module of a source's kind, importing no other; ConfigError if unknown."""
    if source.kind == "local":
        from expertflow.data.sources import local

        return local
    if source.kind == "hub":
        from expertflow.data.sources import hub

        return hub
    if source.kind == "git":
        from expertflow.data.sources import git

        return git
    if source.kind == "generated":
        from expertflow.data.sources import generators

        return generators
    near = get_close_matches(source.kind, KINDS, 1)
    fix = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(KINDS)}"
    raise ConfigError(f"source {source.name}: kind {source.kind!r} is unknown; {fix}")


def fetch_source(spec: FetchSpec, lock: ExpertLock, directory: Path) -> SourceRecord:
    """Make a source readable, writing to ``directory`` if needed; DataError if it is empty."""
    pinned = next(source for source in lock.sources if source.name == spec.source.name)
    fetched = kind_of(spec.source).fetch(spec.source, pinned, directory)
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
