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
from itertools import chain, product
from typing import Any

from msgspec import Struct, field

from expertflow.evaluate.cypher.tokens import (
    COMMA,
    VARIABLES,
    Entity,
    Path,
    Token,
    find_paths,
    group_brackets,
    is_operator,
    split_at,
    token_at,
)
from expertflow.evaluate.records import Judgment

# Properties by label or type; null if the text names none, which proves nothing.
Properties = dict[str, set[str] | None]

_NODES_TITLE = re.compile(r"node (properties|labels)", re.IGNORECASE)
_TYPES_TITLE = re.compile(r"relationship properties", re.IGNORECASE)
_NAME = r"`[^`]+`|[^\W\d]\w*"
_BOLD = re.compile(r"\s*-\s*\*\*(.+?)\*\*\s*$")  # - **Person**
_ITEM = re.compile(r"\s*-\s*`([^`:]+)")  # - `name`: STRING
_INLINE = re.compile(rf"\s*:?({_NAME})\s*(\{{.*\}})?\s*$")  # Person {name: STRING}
_KEY = re.compile(rf"(?:^|[{{,])\s*({_NAME})\s*(?=[:,}}])")  # the name in `{name: STRING, …}`
_PATTERN = re.compile(  # (:Person)-[:KNOWS {since}]->(:Person)
    rf"\s*\(:({_NAME})\)\s*-\s*\[:({_NAME})(?:\s*\{{(.*)\}})?\]\s*->\s*\(:({_NAME})\)"
)
_NODE = re.compile(rf"\s*\(:({_NAME})\s*(\{{.*\}})?\s*\)\s*$")  # (:Person {name, age})
_QUOTED = rf"['\"]?({_NAME})['\"]?"
_TRIPLE = re.compile(  # {'start': Person, 'type': KNOWS, 'end': Person}
    rf"\s*\{{\s*['\"]start['\"]\s*:\s*{_QUOTED}\s*,\s*['\"]type['\"]\s*:\s*{_QUOTED}\s*,"
    rf"\s*['\"]end['\"]\s*:\s*{_QUOTED}\s*\}}"
)
MAX_CHARS = 500_000


class GraphSchema(Struct):
    """Labels, relationship types, and the labels that a type joins, from start to end."""

    nodes: Properties = field(default_factory=dict)
    types: Properties = field(default_factory=dict)
    ends: set[tuple[str, str, str]] = field(default_factory=set)

    def add_relation(self, start: str, kind: str, end: str, keys: set[str] | None = None) -> None:
        # Some texts list no label without properties.
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
            keys = None if found[3] is None else _keys("{" + found[3] + "}")
            schema.add_relation(found[1], found[2], found[4], keys)
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


class NameFaults:
    """Finds names of a query that the schema lacks.

    What a schema does not determine is not judged: properties of a label listed without any, those
    of maps and of variables made by WITH, UNWIND or a list, and names of plug-ins.
    """

    def __init__(self, tokens: Sequence[Token], schema: GraphSchema) -> None:
        self._tokens, self._schema = tokens, schema
        self._paths = find_paths(group_brackets(tokens) or [])
        self._rebound = _rebound(tokens)
        self._nodes = self._bind(node for path in self._paths for node in path.nodes)
        relationships = self._bind(r for path in self._paths for r in path.relationships)
        self._sides = ((self._nodes, schema.nodes), (relationships, schema.types))

    def find_first(self) -> Judgment | None:
        return next(self._all(), None)

    def _all(self) -> Iterator[Judgment]:
        nodes, types = self._schema.nodes, self._schema.types
        for path in self._paths:
            for name in (name for node in path.nodes for name in node.names):
                # `(r:R)` may be a condition on a relationship.
                if name not in nodes and not (name in types and not path.relationships):
                    yield Judgment("unknown_label", f":{name}")
        for name in (n for path in self._paths for r in path.relationships for n in r.names):
            if types and name not in types:
                yield Judgment("unknown_relationship", f":{name}")
        yield from self._of_properties()
        for path in self._paths:
            yield from self._of_directions(path)

    def _bind(self, entities: Iterable[Entity]) -> dict[str, set[str] | None]:
        """Collect each variable's labels or types; null if uncertain."""
        names: dict[str, set[str] | None] = {}
        for entity in entities:
            if entity.variable is None:
                continue
            # A variable used in several patterns has the labels of all.
            known = names.setdefault(entity.variable, set())
            sure = entity.plain and entity.variable not in self._rebound and known is not None
            names[entity.variable] = (known or set()) | set(entity.names) if sure else None
        return names

    def _of_properties(self) -> Iterator[Judgment]:
        for path in self._paths:
            both = (path.nodes, path.relationships)
            for entities, (bound, known) in zip(both, self._sides, strict=True):
                for entity in entities:
                    names = _names_of(entity, bound)
                    if entity.keys is None or names is None:
                        continue
                    for item in split_at(entity.keys.content, COMMA):
                        if item and item[0].kind == "name":
                            yield from _unless_known(item[0].text, names, known)
        for index, token in enumerate(self._tokens):
            key = token_at(self._tokens, index + 2)
            is_property = is_operator(token_at(self._tokens, index + 1), ".") and key.kind == "name"
            if token.kind in VARIABLES and is_property:
                for bound, known in self._sides:
                    if (names := bound.get(token.text)) is not None:
                        yield from _unless_known(key.text, names, known)

    def _of_directions(self, path: Path) -> Iterator[Judgment]:
        known = self._schema.ends
        hops = zip(path.nodes, path.relationships, path.nodes[1:], strict=False)
        for left, relationship, right in hops:
            if not relationship.direction or relationship.has_length or not relationship.plain:
                continue
            ends = (left, right) if relationship.direction == ">" else (right, left)
            starts, stops = (_names_of(node, self._nodes) or set() for node in ends)
            triples = sorted(product(starts, relationship.names, stops))
            # One known combination of the labels is enough.
            if any(triple in known for triple in triples):
                continue
            for start, kind, end in triples:
                if (end, kind, start) in known:
                    detail = f"it is (:{end})-[:{kind}]->(:{start})"
                    yield Judgment("wrong_direction", detail)


def _names_of(entity: Entity, bound: dict[str, set[str] | None]) -> set[str] | None:
    if entity.variable is not None:
        return bound.get(entity.variable)
    return set(entity.names) if entity.plain else None


def _rebound(tokens: Sequence[Token]) -> set[str]:
    found = set()
    for index, token in enumerate(tokens):
        before, after = token_at(tokens, index - 1), token_at(tokens, index + 1)
        is_element = after == Token("keyword", "IN") and is_operator(before, "[", "(", ",")
        if token.kind in VARIABLES and (before == Token("keyword", "AS") or is_element):
            found.add(token.text)
    return found


def _unless_known(key: str, names: set[str], properties: Properties) -> Iterator[Judgment]:
    """Yield a fault if none of the names (all names if empty) has the property."""
    owners = names or set(properties)
    known = [properties.get(name) for name in owners]
    if known and all(keys is not None and key not in keys for keys in known):
        where = ", ".join(f":{name}" for name in sorted(names)) or "no label or type"
        yield Judgment("unknown_property", f"{key} (of {where})"[:200])
