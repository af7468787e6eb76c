"""Tokenize Cypher, classify its words, and find its path patterns."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import ClassVar

from msgspec import Struct

from expertflow.core.records import Record

MAX_CHARS = 200_000

# Reserved words of openCypher 9 and verbs of Neo4j's further clauses. `count` and `type` are
# omitted: they are functions before a parenthesis and valid names elsewhere.
_RESERVED = """
    ADD ALL AND AS ASC ASCENDING BY CALL CASE CONSTRAINT CONTAINS CREATE DELETE DESC DESCENDING
    DETACH DISTINCT DO DROP ELSE END ENDS EXISTS FALSE FOR FOREACH IN IS LIMIT MANDATORY MATCH
    MERGE NOT NULL OF ON OPTIONAL OR ORDER REMOVE REQUIRE RETURN SCALAR SET SKIP STARTS THEN TRUE
    UNION UNIQUE UNWIND WHEN WHERE WITH XOR YIELD
"""
KEYWORDS = frozenset(_RESERVED.split())

_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<number>0[xX][0-9a-fA-F]+|0[oO][0-7]+|[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)
      | (?P<parameter>\$(?:\w+|`(?:[^`]|``)+`))
      | (?P<word>[^\W\d]\w*)
      | (?P<operator>\.\.|<=|>=|<>|=~|\+=|\|\||/(?!\*)|[-+*%^=<>()\[\]{},.:;|&!$])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# After one of these, a brace opens a subquery or counts repetitions; any other opens a map.
_BEFORE_SUBQUERY = frozenset({"EXISTS", "COUNT", "COLLECT", "CALL", ")"})
_WORDS = frozenset({"word", "quoted"})
# Kinds of words that name a value within the query.
VARIABLES = frozenset({"variable", "yielded"})
_CALLED = frozenset({"function", "name", "variable", "yielded", "parameter"})
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CLAUSE_WORDS = """
    CALL CREATE DELETE DETACH FOREACH LIMIT MATCH MERGE OPTIONAL ORDER REMOVE RETURN SET SKIP UNION
    UNWIND WHERE WITH
"""
_CLAUSES = frozenset(_CLAUSE_WORDS.split())


class Token(Record, frozen=True):
    """A piece of a query; equal tokens mean the same. ``text`` of a variable is its number."""

    kind: str
    text: str


class TokenGroup(Struct):
    """A pair of brackets, the first and the last item, and their content."""

    items: "list[Item]"
    kind: ClassVar[str] = "group"

    @property
    def text(self) -> str:
        return self.items[0].text

    @property
    def content(self) -> "list[Item]":
        return self.items[1:-1]


Item = Token | TokenGroup

AS, MATCH, WHERE, _IN = (Token("keyword", word) for word in ("AS", "MATCH", "WHERE", "IN"))
COMMA = Token("operator", ",")


def tokenize(query: str) -> list[Token] | None:
    """Split a query, without whitespace and comments; null if some text fits no token."""
    if len(query) > MAX_CHARS:
        return None
    tokens, position = [], 0
    while position < len(query):
        found = _TOKEN.match(query, position)
        if found is None:
            return None
        position = found.end()
        kind, text = found.lastgroup or "", found[0]
        if kind == "string":
            text = _ESCAPE.sub(lambda m: m[1] if m[1] in "'\"" else m[0], text[1:-1])
        elif kind == "quoted":
            text = text[1:-1].replace("``", "`")
        if kind != "blank":
            tokens.append(Token(kind, text))
    return tokens


def classify_words(tokens: Sequence[Token]) -> list[Token]:
    """Classify words: keywords, functions, names (of labels, keys, properties), variables."""
    names = _find_names(tokens)
    # In `YIELD label` the procedure's own word names the value, so no variable may be renamed.
    variable = "yielded" if any(_is_keyword(t, "YIELD") for t in tokens) else "variable"
    result: list[Token] = []
    for index, token in enumerate(tokens):
        if token.kind in _WORDS:
            kind = "name" if index in names else _kind(tokens, index)
            # Case-insensitive in Cypher; functions of plug-ins (``apoc.…``) are not.
            text = token.text.lower() if kind == "function" else token.text
            text = text.upper() if kind == "keyword" else text
            token = Token(variable if kind == "variable" else kind, text)
        result.append(token)
    return result


def _kind(tokens: Sequence[Token], index: int) -> str:
    before, after = token_at(tokens, index - 1), token_at(tokens, index + 1)
    if is_operator(before, "."):
        return "name"
    if _is_keyword(tokens[index]):
        return "keyword"
    # The last word of ``name.name.name``.
    last = index
    while (
        is_operator(token_at(tokens, last + 1), ".") and token_at(tokens, last + 2).kind in _WORDS
    ):
        last += 2
    opening = token_at(tokens, last + 1)
    opens_subquery = is_operator(opening, "{") and tokens[last].text.upper() in _BEFORE_SUBQUERY
    if is_operator(opening, "(") or opens_subquery:
        return "function" if last == index else "name"
    if _is_keyword(before, "CALL"):
        return "name"
    # Two plain words in a row are a command, such as `SHOW INDEXES` and `LOAD CSV`.
    is_command = any(t.kind in _WORDS and not _is_keyword(t) for t in (before, after))
    return "keyword" if is_command else "variable"


def _find_names(tokens: Sequence[Token]) -> set[int]:
    """Find the keys of maps, and the labels of ``:A``, ``:A|B`` and ``:(A|!B)&C``."""
    names = set[int]()
    in_map = [False]  # for each open bracket, after a first entry for none
    # Whether the next word is a label, and whether a label, perhaps in brackets, just ended.
    expects_label = ends_label = was_key = False
    for index, token in enumerate(tokens):
        before, after = token_at(tokens, index - 1), token_at(tokens, index + 1)
        is_key = in_map[-1] and is_operator(before, "{", ",") and is_operator(after, ":")
        if token.kind in _WORDS and (is_key or expects_label):
            names.add(index)
        if is_operator(token, *_CLOSING):
            in_map.append(token.text == "{" and before.text.upper() not in _BEFORE_SUBQUERY)
        elif is_operator(token, *_CLOSING.values()) and len(in_map) > 1:
            in_map.pop()
        if is_operator(token, ":"):
            # The colon after a key does not open a label.
            expects_label, ends_label = not was_key, False
        elif is_operator(token, "|", "&"):
            expects_label, ends_label = ends_label, False
        elif is_operator(token, ")"):
            expects_label = False
        elif not is_operator(token, "!", "("):
            expects_label, ends_label = False, index in names and not is_key
        was_key = is_key
    return names


def number_variables(tokens: Sequence[Token]) -> list[Token]:
    """Replace variables by their order of appearance; names that a procedure yields are kept."""
    numbers: dict[str, int] = {}
    result = []
    for token in tokens:
        if token.kind == "variable":
            token = Token("variable", str(numbers.setdefault(token.text, len(numbers))))
        result.append(token)
    return result


def token_at(items: Sequence[Item], index: int) -> Item:
    return items[index] if 0 <= index < len(items) else Token("", "")


def is_operator(item: Item, *operators: str) -> bool:
    return item.kind == "operator" and item.text in operators


def mask_variables(items: Iterable[Item]) -> list[tuple[str, str]]:
    return [(t.kind, "" if t.kind in VARIABLES else t.text) for t in flatten(items)]


def _is_keyword(token: Item, *words: str) -> bool:
    return token.kind == "word" and token.text.upper() in (words or KEYWORDS)


def group_brackets(tokens: Sequence[Token]) -> list[Item] | None:
    """Nest the tokens by their brackets; null if they are unbalanced."""
    outer: list[list[Item]] = []
    items: list[Item] = []
    for token in tokens:
        if is_operator(token, *_CLOSING):
            outer.append(items)
            items = []
        items.append(token)
        if is_operator(token, *_CLOSING.values()):
            if not outer or token.text != _CLOSING[items[0].text]:
                return None
            group = TokenGroup(items)
            items = outer.pop()
            items.append(group)
    return None if outer else items


def as_group(item: Item, opening: str) -> TokenGroup | None:
    return item if isinstance(item, TokenGroup) and item.text == opening else None


def flatten(items: Iterable[Item]) -> Iterator[Token]:
    for item in items:
        if isinstance(item, TokenGroup):
            yield from flatten(item.items)
        else:
            yield item


def list_variables(items: Iterable[Item]) -> list[str]:
    return [token.text for token in flatten(items) if token.kind in VARIABLES]


def list_rebound(tokens: Sequence[Token]) -> set[str]:
    """Return the variables that WITH, UNWIND, a list or a predicate binds: they may be anything."""
    return {
        token.text
        for index, token in enumerate(tokens)
        if token_at(tokens, index - 1) == AS or token_at(tokens, index + 1) == _IN
    }


def iter_levels(items: list[Item]) -> Iterator[list[Item]]:
    """Yield the items and those of each group within, the outer before the inner ones."""
    yield items
    for item in items:
        if isinstance(item, TokenGroup):
            yield from iter_levels(item.items)


def split_at(items: Sequence[Item], separator: Token) -> list[list[Item]]:
    at = [index for index, item in enumerate(items) if item == separator]
    return [list(items[a + 1 : b]) for a, b in pairwise([-1, *at, len(items)])]


def ends_clause(items: Sequence[Item], index: int) -> bool:
    item, before = items[index], token_at(items, index - 1)
    # In `STARTS WITH` it does not open a clause.
    is_predicate = item.text == "WITH" and before.text in ("STARTS", "ENDS")
    opens_clause = item.kind == "keyword" and item.text in _CLAUSES and not is_predicate
    return opens_clause or is_operator(item, *")]};")


class Entity(Struct, kw_only=True):
    """A node or relationship of a pattern.

    ``names`` are its labels or types; ``plain`` means only ``:``, ``|`` and ``&`` join them, so
    nothing is excluded. ``group`` is its brackets, which `-->` lacks, and ``keys`` its map.
    """

    group: TokenGroup | None
    variable: str | None
    names: list[str]
    plain: bool
    has_length: bool
    keys: TokenGroup | None
    direction: str = ""  # ">", "<", or "" if the pattern matches both


class Path(Struct, kw_only=True):
    """A path pattern: ``items[start:end]``; in ``entities`` nodes and relationships alternate."""

    items: list[Item]
    start: int
    end: int
    entities: list[Entity]
    in_match: bool = True

    @property
    def nodes(self) -> list[Entity]:
        return self.entities[::2]

    @property
    def relationships(self) -> list[Entity]:
        return self.entities[1::2]


def find_paths(items: list[Item], *, in_match: bool = False) -> list[Path]:
    """Find all path patterns; ``(a)`` alone may be an expression, so needs MATCH, label or keys."""
    paths: list[Path] = []
    end = 0
    for index, item in enumerate(items):
        if ends_clause(items, index):
            in_match = item == MATCH
        if index < end or not isinstance(item, TokenGroup):
            continue
        before = token_at(items, index - 1)
        # `f(a)` is a call.
        path = None if before.kind in _CALLED else read_path(items, index)
        if path is not None:
            first = path.nodes[0]
            if path.relationships or first.names or first.keys or before == MATCH:
                path.in_match, end = in_match, path.end
                paths.append(path)
                continue
        paths += find_paths(item.items, in_match=in_match)
    return paths


def read_path(items: list[Item], start: int) -> Path | None:
    node = _read_node(items, start)
    if node is None:
        return None
    entities, end = [node], start + 1
    while (step := _read_relationship(items, end)) and (node := _read_node(items, step[1])):
        entities += [step[0], node]
        end = step[1] + 1
    return Path(items=items, start=start, end=end, entities=entities)


def _read_node(items: Sequence[Item], index: int) -> Entity | None:
    group = as_group(token_at(items, index), "(")
    return None if group is None else _read_entity(group)


def _read_relationship(items: Sequence[Item], index: int) -> tuple[Entity, int] | None:
    """Read ``<-[…]->`` with optional brackets and arrows; also return where it ends."""
    is_left = is_operator(token_at(items, index), "<")
    index += is_left
    group = as_group(token_at(items, index + 1), "[")
    last = index + 1 + (group is not None)
    if not all(is_operator(token_at(items, at), "-") for at in (index, last)):
        return None
    is_right = is_operator(token_at(items, last + 1), ">")
    if (entity := _read_entity(group)) is None:
        return None
    # `<-->` is `--`.
    entity.direction = "" if is_left == is_right else "<" if is_left else ">"
    return entity, last + 1 + is_right


def _read_entity(group: TokenGroup | None) -> Entity | None:
    rest = [] if group is None else group.content
    variable = rest.pop(0).text if rest and rest[0].kind in VARIABLES else None
    labels = list(takewhile(_is_label, rest)) if rest and is_operator(rest[0], ":") else []
    del rest[: len(labels)]
    has_length = bool(rest) and is_operator(rest[0], "*")  # `*`, `*2`, `*1..3`
    while has_length and rest and (rest[0].kind == "number" or is_operator(rest[0], "*", "..")):
        del rest[0]
    if (keys := as_group(token_at(rest, 0), "{")) is not None:
        del rest[0]
    is_condition = rest[:1] == [WHERE]
    # Not a pattern, as in `(a + b)`.
    if rest and not is_condition:
        return None
    words = list(flatten(labels))
    return Entity(
        group=group,
        variable=variable,
        names=[word.text for word in words if word.kind == "name"],
        plain=not is_condition and not any(is_operator(word, "!", "%") for word in words),
        has_length=has_length,
        keys=keys,
    )


def _is_label(item: Item) -> bool:
    return all(word.kind == "name" or is_operator(word, *":|&!()%") for word in flatten([item]))
