"""Read a graph's schema from the texts that data sets and Neo4j's tools write it in.

Known forms: sections of ``- **Label**`` with ``- `property`: TYPE`` lines; sections of
``Label {property: TYPE}`` lines (also under "Relevant node labels …"); ``(:A)-[:R]->(:B)`` and
``{'start': A, 'type': R, 'end': B}`` for relationships; ``(:Label {a, b}); …`` on one line; and
the JSON of ``apoc.meta.schema``.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, field

# The properties of a label or type; nothing where the text names none, which proves nothing.
Properties = dict[str, set[str] | None]

_NODES_TITLE = re.compile(r"node (properties|labels)", re.IGNORECASE)
_TYPES_TITLE = re.compile(r"relationship properties", re.IGNORECASE)
_NAME = r"`[^`]+`|[^\W\d]\w*"
_BOLD = re.compile(r"\s*-\s*\*\*(.+?)\*\*\s*$")
_ITEM = re.compile(r"\s*-\s*`([^`:]+)")
_INLINE = re.compile(rf"\s*:?({_NAME})\s*(\{{.*\}})?\s*$")
_KEY = re.compile(rf"(?:^|[{{,])\s*({_NAME})\s*(?=[:,}}])")
_PATTERN = re.compile(
    rf"\s*\(:({_NAME})\)\s*-\s*\[:({_NAME})(?:\s*\{{(.*)\}})?\]\s*->\s*\(:({_NAME})\)"
)
_NODE = re.compile(rf"\s*\(:({_NAME})\s*(\{{.*\}})?\s*\)\s*$")
_QUOTED = rf"['\"]?({_NAME})['\"]?"
_TRIPLE = re.compile(
    rf"\s*\{{\s*['\"]start['\"]\s*:\s*{_QUOTED}\s*,\s*['\"]type['\"]\s*:\s*{_QUOTED}\s*,"
    rf"\s*['\"]end['\"]\s*:\s*{_QUOTED}\s*\}}"
)
MAX_CHARS = 500_000


class GraphSchema(Struct):
    """Labels, relationship types and which labels a type joins, from start to end."""

    nodes: Properties = field(default_factory=dict)
    types: Properties = field(default_factory=dict)
    ends: set[tuple[str, str, str]] = field(default_factory=set)


@lru_cache(maxsize=64)
def read_schema(text: str) -> GraphSchema | None:
    """Read a schema, or nothing where the text has none of the known forms."""
    if len(text) > MAX_CHARS:
        return None
    schema = _from_json(text) if text.lstrip().startswith("{") else None
    schema = schema or _from_lines(text)
    return schema if schema.nodes else None


def _from_lines(text: str) -> GraphSchema:
    schema = GraphSchema()
    reader = _Lines(schema)
    for line in text.split("\n"):
        for part in line.split(";") if line.lstrip().startswith("(:") else [line]:
            reader.take(part)
    return schema


class _Lines:
    """Goes through a schema's lines and knows in which section and below which label it is."""

    def __init__(self, schema: GraphSchema) -> None:
        self._schema = schema
        self._section: Properties | None = None
        self._owner: str | None = None

    def take(self, line: str) -> None:
        if (pattern := _PATTERN.match(line)) is not None:
            self._join(pattern[1], pattern[2], pattern[4])
            if pattern[3] is not None:
                _add(self._schema.types, pattern[2], _keys("{" + pattern[3] + "}"))
        elif (triple := _TRIPLE.match(line)) is not None:
            self._join(triple[1], triple[2], triple[3])
        elif (node := _NODE.match(line)) is not None:
            _add(self._schema.nodes, node[1], _keys(node[2]))
        elif line.rstrip().endswith(":"):
            self._section, self._owner = self._titled(line), None
        elif self._section is not None:
            self._take_entry(self._section, line)

    def _titled(self, line: str) -> Properties | None:
        if _NODES_TITLE.search(line):
            return self._schema.nodes
        return self._schema.types if _TYPES_TITLE.search(line) else None

    def _take_entry(self, section: Properties, line: str) -> None:
        if (bold := _BOLD.match(line)) is not None:
            self._owner = bold[1]
            _add(section, self._owner, set())
        elif self._owner is not None and (item := _ITEM.match(line)) is not None:
            _add(section, self._owner, {item[1].strip()})
        elif self._owner is None and (inline := _INLINE.match(line)) is not None:
            _add(section, inline[1], _keys(inline[2]))

    def _join(self, start: str, kind: str, end: str) -> None:
        # A label without properties has no entry of its own in some texts.
        _add(self._schema.nodes, start, None)
        _add(self._schema.nodes, end, None)
        _add(self._schema.types, kind, None)
        self._schema.ends.add((_name(start), _name(kind), _name(end)))


def _from_json(text: str) -> GraphSchema | None:
    """Read the JSON of ``apoc.meta.schema``."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entries, dict):
        return None
    schema = GraphSchema()
    for name, entry in entries.items():
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind == "node":
            _add(schema.nodes, name, _json_keys(entry))
            _add_json_ends(schema, name, entry.get("relationships"))
        elif kind == "relationship":
            _add(schema.types, name, _json_keys(entry))
    return schema


def _json_keys(entry: Mapping[str, Any]) -> set[str] | None:
    properties = entry.get("properties")
    return set(properties) if isinstance(properties, dict) else None


def _add_json_ends(schema: GraphSchema, label: str, relationships: object) -> None:
    for kind, relation in relationships.items() if isinstance(relationships, dict) else ():
        if not isinstance(relation, dict):
            continue
        _add(schema.types, kind, _json_keys(relation))
        for other in relation.get("labels", ()):
            is_out = relation.get("direction") == "out"
            schema.ends.add((label, kind, other) if is_out else (other, kind, label))


def _name(text: str) -> str:
    return text.strip("`")


def _keys(text: str | None) -> set[str] | None:
    return None if text is None else {_name(key) for key in _KEY.findall(text)}


def _add(properties: Properties, name: str, keys: set[str] | None) -> None:
    known = properties.setdefault(_name(name), None)
    if keys is not None:
        properties[_name(name)] = (known or set()) | keys
