"""Find the path patterns of a query, ``(a:A {k: 1})-[r:R]->(b)``, among its words."""

from collections.abc import Sequence

from expertflow.core.records import Record
from expertflow.evaluate.cypher.tokens import VARIABLES, Token, at, is_operator

_CALLED = frozenset({"function", "plugin", "name", "variable", "yielded", "parameter"})
# Words of a label expression; a longer one is read as no pattern, so that reading stays linear.
_MAX_LABEL_TOKENS = 64


class Entity(Record, frozen=True, kw_only=True):
    """A node or a relationship of a pattern; positions are of tokens, ends exclusive.

    ``names`` are its labels or types and ``plain`` says that they are joined by ``:``, ``|`` and
    ``&`` only, so that nothing is excluded. ``body`` is what its brackets hold.
    """

    start: int
    end: int
    body: tuple[int, int]
    variable: str | None = None
    names: tuple[str, ...] = ()
    plain: bool = True
    keys: tuple[int, int] | None = None
    has_length: bool = False
    direction: str = ""  # ">", "<", or "" where the pattern takes both


class Path(Record, frozen=True, kw_only=True):
    nodes: tuple[Entity, ...]
    relationships: tuple[Entity, ...]

    @property
    def start(self) -> int:
        return self.nodes[0].start

    @property
    def end(self) -> int:
        return self.nodes[-1].end


def closing_brackets(tokens: Sequence[Token]) -> dict[int, int]:
    pairs, closes = {}, {")": "(", "]": "[", "}": "{"}
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if is_operator(token, "(", "[", "{"):
            opened.append(index)
        elif is_operator(token, ")", "]", "}"):
            if opened and tokens[opened[-1]].text == closes[token.text]:
                pairs[opened.pop()] = index
            else:
                opened.clear()
    return pairs


def has_closed_brackets(tokens: Sequence[Token]) -> bool:
    n_brackets = sum(is_operator(token, *"()[]{}") for token in tokens)
    return n_brackets == 2 * len(closing_brackets(tokens))


def find_paths(tokens: Sequence[Token]) -> list[Path]:
    """List all path patterns, wherever they stand, of words that ``classify`` has named.

    ``(a)`` alone counts only behind MATCH or with a label or keys: it may be an expression.
    """
    closes = closing_brackets(tokens)
    paths, index = [], 0
    while index < len(tokens):
        before = at(tokens, index - 1)
        is_start = is_operator(tokens[index], "(") and before.kind not in _CALLED
        path = read_path(tokens, index, closes) if is_start else None
        if path is not None and (
            path.relationships
            or path.nodes[0].names
            or path.nodes[0].keys
            or before == Token("keyword", "MATCH")
        ):
            paths.append(path)
            index = path.end
        else:
            index += 1
    return paths


def read_path(tokens: Sequence[Token], start: int, closes: dict[int, int]) -> Path | None:
    node = _node(tokens, start, closes)
    if node is None:
        return None
    nodes, relationships = [node], []
    while (relationship := _relationship(tokens, nodes[-1].end, closes)) is not None:
        node = _node(tokens, relationship.end, closes)
        if node is None:
            break
        relationships.append(relationship)
        nodes.append(node)
    return Path(nodes=tuple(nodes), relationships=tuple(relationships))


def _node(tokens: Sequence[Token], start: int, closes: dict[int, int]) -> Entity | None:
    if not is_operator(at(tokens, start), "(") or start not in closes:
        return None
    end = closes[start] + 1
    return _entity(tokens, (start, end), (start + 1, end - 1), closes, "")


def _relationship(tokens: Sequence[Token], start: int, closes: dict[int, int]) -> Entity | None:
    index, is_left = start, is_operator(at(tokens, start), "<")
    index += is_left
    if not is_operator(at(tokens, index), "-"):
        return None
    index += 1
    body = (index, index)
    if is_operator(at(tokens, index), "["):
        if index not in closes:
            return None
        body = (index + 1, closes[index])
        index = closes[index] + 1
    if not is_operator(at(tokens, index), "-"):
        return None
    is_right = is_operator(at(tokens, index + 1), ">")
    direction = "" if is_left == is_right else "<" if is_left else ">"
    return _entity(tokens, (start, index + 1 + is_right), body, closes, direction)


def _entity(
    tokens: Sequence[Token],
    span: tuple[int, int],
    body: tuple[int, int],
    closes: dict[int, int],
    direction: str,
) -> Entity | None:
    index, end = body
    variable = None
    if index < end and tokens[index].kind in VARIABLES:
        variable, index = tokens[index].text, index + 1
    names: list[str] = []
    plain, after = True, min(end, index + _MAX_LABEL_TOKENS)
    if index < end and is_operator(tokens[index], ":"):
        while index < after and (
            tokens[index].kind == "name" or is_operator(tokens[index], *":|&!()%")
        ):
            if tokens[index].kind == "name":
                names.append(tokens[index].text)
            plain &= not is_operator(tokens[index], "!", "%")
            index += 1
    has_length = index < end and is_operator(tokens[index], "*")
    while has_length and index < end and _is_length(tokens[index]):
        index += 1
    keys = None
    if index < end and is_operator(tokens[index], "{") and index in closes:
        keys, index = (index, closes[index] + 1), closes[index] + 1
    is_condition = index < end and tokens[index] == Token("keyword", "WHERE")
    if index != end and not is_condition:
        return None
    return Entity(
        start=span[0],
        end=span[1],
        body=body,
        variable=variable,
        names=tuple(names),
        plain=plain and not is_condition,
        keys=keys,
        has_length=has_length,
        direction=direction,
    )


def _is_length(token: Token) -> bool:
    return token.kind == "number" or is_operator(token, "*", "..")
