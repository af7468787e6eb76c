"""Hold the names in a query against the schema of its graph."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from expertflow.core.records import Record
from expertflow.evaluate.cypher.paths import Entity, Path, find_paths
from expertflow.evaluate.cypher.schema import GraphSchema, Properties
from expertflow.evaluate.cypher.tokens import VARIABLES, Token, at, is_operator, nesting


class NameFault(Record, frozen=True):
    """A name that the schema does not have; ``kind`` is an error kind of the task ``cypher``."""

    kind: str
    detail: str


def find_name_fault(tokens: Sequence[Token], schema: GraphSchema) -> NameFault | None:
    """Give the first fault: of labels, then types, then properties, then directions.

    What the text of a schema does not tell is not judged: properties of a label listed without
    any, those of maps and of variables that WITH, UNWIND or a list makes, names of plug-ins.
    """
    return next(_Names(tokens, schema).faults(), None)


class _Names:
    def __init__(self, tokens: Sequence[Token], schema: GraphSchema) -> None:
        self._tokens, self._schema = tokens, schema
        self._paths = find_paths(tokens)
        self._rebound = _rebound(tokens)
        self._nodes = self._bind(node for path in self._paths for node in path.nodes)
        self._relationships = self._bind(r for path in self._paths for r in path.relationships)

    def faults(self) -> Iterator[NameFault]:
        yield from self._of_labels()
        yield from self._of_types()
        yield from self._of_properties()
        for path in self._paths:
            yield from self._of_directions(path)

    def _bind(self, entities: Iterable[Entity]) -> dict[str, set[str] | None]:
        """Collect each variable's names; nothing where they are not sure."""
        names: dict[str, set[str] | None] = {}
        for entity in entities:
            if entity.variable is None:
                continue
            known = names.setdefault(entity.variable, set())
            sure = entity.plain and entity.variable not in self._rebound and known is not None
            names[entity.variable] = (known or set()) | set(entity.names) if sure else None
        return names

    def _of_labels(self) -> Iterator[NameFault]:
        known, types = self._schema.nodes, self._schema.types
        for path in self._paths:
            for node in path.nodes:
                for name in node.names:
                    # `(r:R)` may be a condition on a relationship.
                    if name not in known and not (name in types and not path.relationships):
                        yield NameFault("unknown_label", f":{name}")

    def _of_types(self) -> Iterator[NameFault]:
        known = self._schema.types
        for path in self._paths:
            for relationship in path.relationships:
                for name in relationship.names:
                    if known and name not in known:
                        yield NameFault("unknown_relationship", f":{name}")

    def _of_properties(self) -> Iterator[NameFault]:
        for path in self._paths:
            for node in path.nodes:
                names = self._names_of(node, self._nodes)
                yield from self._of_keys(node, names, self._schema.nodes)
            for relationship in path.relationships:
                names = self._names_of(relationship, self._relationships)
                yield from self._of_keys(relationship, names, self._schema.types)
        for index, token in enumerate(self._tokens):
            if token.kind not in VARIABLES or not is_operator(at(self._tokens, index + 1), "."):
                continue
            key = at(self._tokens, index + 2)
            for bound, properties in (
                (self._nodes, self._schema.nodes),
                (self._relationships, self._schema.types),
            ):
                if key.kind == "name" and (names := bound.get(token.text)) is not None:
                    yield from _unless_known(key.text, names, properties)

    @staticmethod
    def _names_of(entity: Entity, bound: dict[str, set[str] | None]) -> set[str] | None:
        if entity.variable is not None:
            return bound.get(entity.variable)
        return set(entity.names) if entity.plain else None

    def _of_keys(
        self, entity: Entity, names: set[str] | None, properties: Properties
    ) -> Iterator[NameFault]:
        if entity.keys is None or names is None:
            return
        level = 0
        for index in range(*entity.keys):
            token = self._tokens[index]
            level += nesting(token)
            is_key = token.kind == "name" and is_operator(at(self._tokens, index - 1), "{", ",")
            if level == 1 and is_key:
                yield from _unless_known(token.text, names, properties)

    def _of_directions(self, path: Path) -> Iterator[NameFault]:
        for left, relationship, right in zip(
            path.nodes, path.relationships, path.nodes[1:], strict=False
        ):
            if not relationship.direction or relationship.has_length or not relationship.plain:
                continue
            ends = left, right
            start, end = ends if relationship.direction == ">" else ends[::-1]
            starts = self._names_of(start, self._nodes) or set()
            stops = self._names_of(end, self._nodes) or set()
            if (fault := self._backward(starts, relationship.names, stops)) is not None:
                yield fault

    def _backward(
        self, starts: set[str], types: tuple[str, ...], stops: set[str]
    ) -> NameFault | None:
        known = self._schema.ends
        triples = sorted(product(starts, types, stops))
        if not triples or any(triple in known for triple in triples):
            return None
        for start, kind, end in triples:
            if (end, kind, start) in known:
                return NameFault("wrong_direction", f"it is (:{end})-[:{kind}]->(:{start})")
        return None


def _rebound(tokens: Sequence[Token]) -> set[str]:
    """Find the variables that get another meaning: by AS, or as the element of a list."""
    return {
        token.text
        for index, token in enumerate(tokens)
        if token.kind in VARIABLES
        and (
            at(tokens, index - 1) == Token("keyword", "AS")
            or (
                at(tokens, index + 1) == Token("keyword", "IN")
                and is_operator(at(tokens, index - 1), "[", "(", ",")
            )
        )
    }


def _unless_known(key: str, names: set[str], properties: Properties) -> Iterator[NameFault]:
    """Yield a fault where none of the names, or of all if there are none, has the property."""
    owners = names or set(properties)
    known = [properties.get(name) for name in owners]
    if known and all(keys is not None and key not in keys for keys in known):
        where = ", ".join(f":{name}" for name in sorted(names)) or "no label or type"
        yield NameFault("unknown_property", f"{key} (of {where})"[:200])
