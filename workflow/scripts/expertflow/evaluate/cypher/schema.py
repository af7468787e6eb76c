"""Parse a graph's schema from the text formats of data sets, and check names against it.

Known formats: sections of ``- **Label**`` with ``- `property`: TYPE`` lines; sections of
``Label {property: TYPE}`` lines (also under "Relevant node labels …"); ``(:A)-[:R]->(:B)`` and
``{'start': A, 'type': R, 'end': B}`` for relationships; ``(:Label {a, b}); …`` on one line; and
the JSON of ``apoc.meta.schema``.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, cycle, product
from typing import Any

from msgspec import Struct, field

from expertflow.evaluate.cypher.tokens import (
    COMMA,
    VARIABLES,
    Entity,
    Item,
    Path,
    Token,
    find_paths,
    group_brackets,
    is_operator,
    list_rebound,
    split_at,
)
from expertflow.evaluate.records import Judgment

# Properties by label or type; null if the text lists none, which proves nothing.
Properties = dict[str, set[str] | None]

_NODES_TITLE = re.compile(r"node (properties|labels)", re.IGNORECASE)
_TYPES_TITLE = re.compile(r"relationship properties", re.IGNORECASE)
_NAME = r"`[^`]+`|[^\W\d]\w*"
_BOLD = re.compile(r"\s*-\s*\*\*(.+?)\*\*\s*$")  # - **Person**
_ITEM = re.compile(r"\s*-\s*`([^`:]+)")  # - `name`: STRING
_INLINE = re.compile(rf"\s*:?({_NAME})\s*(\{{.*\}})?\s*$")  # Person {name: STRING}
_KEY = re.compile(rf"[{{,]\s*({_NAME})\s*(?=[:,}}])")  # the name in `{name: STRING, …}`
_PATTERN = re.compile(  # (:Person)-[:KNOWS {since}]->(:Person)
    rf"\s*\(:({_NAME})\)\s*-\s*\[:({_NAME})\s*(\{{.*\}})?\]\s*->\s*\(:({_NAME})\)"
)
_NODE = re.compile(rf"\s*\(:({_NAME})\s*(\{{.*\}})?\s*\)\s*$")  # (:Person {name, age})
_QUOTED = rf"['\"]?({_NAME})['\"]?"
_TRIPLE = re.compile(  # {'start': Person, 'type': KNOWS, 'end': Person}
    rf"\s*\{{\s*['\"]start['\"]\s*:\s*{_QUOTED}\s*,\s*['\"]type['\"]\s*:\s*{_QUOTED}\s*,"
    rf"\s*['\"]end['\"]\s*:\s*{_QUOTED}\s*\}}"
)
MAX_CHARS = 500_000
# The labels or types of each variable, null if uncertain, and the properties of all such.
Bindings = dict[str | int, tuple[set[str] | None, Properties]]


class GraphSchema(Struct):
    """Labels, relationship types, and the labels that a type connects, from start to end."""

    nodes: Properties = field(default_factory=dict)
    types: Properties = field(default_factory=dict)
    ends: set[tuple[str, str, str]] = field(default_factory=set)

    def add_relation(self, start: str, kind: str, end: str, keys: set[str] | None = None) -> None:
        # Some texts omit labels without properties.
        _add(self.nodes, start, None)
        _add(self.nodes, end, None)
        _add(self.types, kind, keys)
        self.ends.add((_name(start), _name(kind), _name(end)))


@lru_cache(maxsize=64)
def read_schema(text: str) -> GraphSchema | None:
    if len(text) > MAX_CHARS:
        return None
    schema = _from_json(text) if text.lstrip().startswith("{") else None
    schema = schema or _from_lines(text.split("\n"))
    return schema if schema.nodes else None


def _from_lines(lines: Iterable[str]) -> GraphSchema:
    schema = GraphSchema()
    section: Properties | None = None
    owner: str | None = None
    parts = (x.split(";") if x.lstrip().startswith("(:") else [x] for x in lines)
    for line in chain.from_iterable(parts):
        if (found := _PATTERN.match(line)) is not None:
            schema.add_relation(found[1], found[2], found[4], _keys(found[3]))
        elif (found := _TRIPLE.match(line)) is not None:
            schema.add_relation(found[1], found[2], found[3])
        elif (found := _NODE.match(line)) is not None:
            _add(schema.nodes, found[1], _keys(found[2]))
        elif line.rstrip().endswith(":"):  # a title, of a known section or another
            section = owner = None
            if _NODES_TITLE.search(line):
                section = schema.nodes
            elif _TYPES_TITLE.search(line):
                section = schema.types
        elif section is None:
            continue
        elif (found := _BOLD.match(line)) is not None:
            owner = found[1]
            _add(section, owner, set())
        elif owner is not None and (found := _ITEM.match(line)) is not None:
            _add(section, owner, {found[1].strip()})
        elif owner is None and (found := _INLINE.match(line)) is not None:
            _add(section, found[1], _keys(found[2]))
    return schema


def _from_json(text: str) -> GraphSchema | None:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entries, dict):
        return None
    schema = GraphSchema()
    for name, entry in _objects(entries):
        if entry.get("type") == "relationship":
            _add(schema.types, name, _json_keys(entry))
        if entry.get("type") != "node":
            continue
        _add(schema.nodes, name, _json_keys(entry))
        for kind, relation in _objects(entry.get("relationships")):
            _add(schema.types, kind, _json_keys(relation))
            for other in relation.get("labels", ()):
                is_out = relation.get("direction") == "out"
                schema.ends.add((name, kind, other) if is_out else (other, kind, name))
    return schema


def _objects(value: object) -> list[tuple[str, dict[str, Any]]]:
    pairs = value.items() if isinstance(value, dict) else ()
    return [(name, entry) for name, entry in pairs if isinstance(entry, dict)]


def _json_keys(entry: Mapping[str, Any]) -> set[str] | None:
    properties = entry.get("properties")
    return set(properties) if isinstance(properties, dict) else None


def _name(text: str) -> str:
    return text.strip("`")


def _keys(text: str | None) -> set[str] | None:
    return None if text is None else {_name(key) for key in _KEY.findall(text)}


def _add(properties: Properties, name: str, keys: set[str] | None) -> None:
    known = properties.setdefault(_name(name), None)
    if keys is not None:
        properties[_name(name)] = (known or set()) | keys


def find_name_fault(tokens: Sequence[Token], schema: GraphSchema) -> Judgment | None:
    """Find the first name of a query that the schema lacks.

    What a schema does not determine is not judged: properties of a label listed without any, those
    of maps and of variables made by WITH, UNWIND or a list, and names of plug-ins.
    """
    paths = find_paths(group_brackets(tokens) or [])
    bound = _bind(tokens, paths, schema)
    faults = (
        _unknown_names(paths, schema),
        _unknown_properties(tokens, paths, bound),
        _wrong_directions(paths, bound, schema.ends),
    )
    return next(chain.from_iterable(faults), None)


def _bind(tokens: Sequence[Token], paths: list[Path], schema: GraphSchema) -> Bindings:
    rebound = list_rebound(tokens)
    bound: Bindings = {}
    for path in paths:
        for entity, properties in zip(path.entities, cycle((schema.nodes, schema.types))):
            # A variable used in several patterns has the labels of all.
            names, _ = bound.setdefault(_key(entity), (set(), properties))
            sure = entity.plain and entity.variable not in rebound and names is not None
            names = (names or set()) | set(entity.names) if sure else None
            bound[_key(entity)] = names, properties
    return bound


def _key(entity: Entity) -> str | int:
    return entity.variable or id(entity)


def _unknown_names(paths: list[Path], schema: GraphSchema) -> Iterator[Judgment]:
    for path in paths:
        # `(r:R)` alone may be a condition on a relationship.
        known = schema.nodes if path.relationships else schema.nodes | schema.types
        for name in (name for node in path.nodes for name in node.names):
            if name not in known:
                yield Judgment("unknown_label", f":{name}")
    for name in (n for path in paths for r in path.relationships for n in r.names):
        if schema.types and name not in schema.types:
            yield Judgment("unknown_relationship", f":{name}")


def _unknown_properties(
    tokens: Sequence[Token], paths: list[Path], bound: Bindings
) -> Iterator[Judgment]:
    uses: list[tuple[Item, str | int]] = [
        (item[0], _key(entity))
        for path in paths
        for entity in (*path.nodes, *path.relationships)
        for item in split_at(entity.keys.content if entity.keys else [], COMMA)
        if item
    ]
    for variable, dot, name in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if variable.kind in VARIABLES and is_operator(dot, "."):
            uses.append((name, variable.text))
    for key, owner in uses:
        names, properties = bound.get(owner, (None, {}))
        if names is None or key.kind != "name":
            continue
        # Without a label, it may be a property of any.
        known = [properties.get(name) for name in names or properties]
        if known and all(keys is not None and key.text not in keys for keys in known):
            where = ", ".join(f":{name}" for name in sorted(names)) or "no label or type"
            yield Judgment("unknown_property", f"{key.text} (of {where})"[:200])


def _wrong_directions(
    paths: list[Path], bound: Bindings, known: set[tuple[str, str, str]]
) -> Iterator[Judgment]:
    hops = (zip(path.nodes, path.relationships, path.nodes[1:], strict=False) for path in paths)
    for left, relationship, right in chain.from_iterable(hops):
        if not relationship.direction or relationship.has_length or not relationship.plain:
            continue
        ends = (left, right) if relationship.direction == ">" else (right, left)
        starts, stops = (bound[_key(node)][0] or set() for node in ends)
        triples = sorted(product(starts, relationship.names, stops))
        # One known combination of the labels is enough.
        if any(triple in known for triple in triples):
            continue
        for start, kind, end in triples:
            if (end, kind, start) in known:
                yield Judgment("wrong_direction", f"the schema has (:{end})-[:{kind}]->(:{start})")
