"""All source kinds by their name in a manifest, and fetching from one."""

from functools import cache
from pathlib import Path

from msgspec.structs import asdict, replace

from expertflow.core.plugins import import_members
from expertflow.core.settings import JsonSchema
from expertflow.data.records import ExpertLock, SourceRecord
from expertflow.data.settings import FetchSpec, SourceSpec
from expertflow.data.sources.base import DataSource


@cache
def source_kinds() -> dict[str, type[DataSource]]:
    classes = import_members("expertflow.data.sources")
    # The folder also has helper modules, which declare no kind.
    kinds = [one for one in classes if issubclass(one, DataSource) and one is not DataSource]
    return {one.kind: one for one in kinds}


def open_source(spec: SourceSpec) -> DataSource:
    """Return a source as its kind; ConfigError for an unknown option."""
    return source_kinds()[spec.kind](spec)


def fetch_source(spec: FetchSpec, lock: ExpertLock, directory: Path) -> SourceRecord:
    """Make a source readable, writing to ``directory`` if needed."""
    pinned = next(source for source in lock.sources if source.name == spec.source.name)
    fetched = open_source(spec.source).fetch(pinned, directory)
    # The lock of a hub source may have no commit yet; fetching finds it.
    fetched = replace(fetched, revision=fetched.revision or pinned.revision)
    known = {name: getattr(pinned, name) for name in ("name", "kind", "n_shards")}
    return SourceRecord(preset=spec.preset, **known, **asdict(fetched))


def declare_kinds(schema: JsonSchema) -> None:
    """Add the kinds and their required keys to the schema of a manifest's source."""
    schema["properties"]["kind"]["enum"] = list(source_kinds())
    schema["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
            "then": {"required": list(kind.required)},
        }
        for name, kind in source_kinds().items()
    ]
