"""All source kinds, by the name that a manifest gives them."""

from difflib import get_close_matches
from functools import cache

from expertflow.core.errors import ConfigError
from expertflow.core.plugins import import_members
from expertflow.core.settings import JsonSchema
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.base import DataSource


@cache
def source_kinds() -> dict[str, type[DataSource]]:
    classes = import_members("expertflow.data.sources")
    kinds = [one for one in classes if issubclass(one, DataSource) and one is not DataSource]
    return {one.kind: one for one in kinds}


def open_source(spec: SourceSpec) -> DataSource:
    """Return a source as its kind; ConfigError for an unknown kind or option."""
    kinds = source_kinds()
    if spec.kind in kinds:
        return kinds[spec.kind](spec)
    near = get_close_matches(spec.kind, kinds, 1)
    fix = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(kinds)}"
    raise ConfigError(f"source {spec.name}: kind {spec.kind!r} is unknown; {fix}")


def declare_kinds(schema: JsonSchema) -> None:
    """Add to the schema of a manifest's source which kinds there are and which keys they need."""
    schema["properties"]["kind"]["enum"] = list(source_kinds())
    schema["allOf"] = [
        {"if": {"properties": {"kind": {"const": name}}}, "then": {"required": list(kind.required)}}
        for name, kind in source_kinds().items()
    ]
