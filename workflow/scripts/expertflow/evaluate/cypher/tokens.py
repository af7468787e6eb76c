"""Tokenize Cypher, classify its words, and find its path patterns."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

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
      | (?P<unclosed>/\*)
      | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<number>0[xX][0-9a-fA-F]+|0[oO][0-7]+|[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)
      | (?P<parameter>\$(?:\w+|`(?:[^`]|``)+`))
      | (?P<word>[^\W\d]\w*)
      | (?P<operator>\.\.|<=|>=|<>|=~|\+=|\|\||[-+*/%^=<>()\[\]{},.:;|&!$])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# After one of these, a brace opens a subquery or counts repetitions; any other opens a map.
_BEFORE_SUBQUERY = frozenset({"EXISTS", "COUNT", "COLLECT", "CALL", ")"})
_WORDS = frozenset({"word", "quoted"})
# Kinds of words that name a value within the query.
VARIABLES = frozenset({"variable", "yielded"})
_CALLED = frozenset({"function", "plugin", "name", "variable", "yielded", "parameter"})
# A longer label expression is not a pattern, so that parsing stays linear.
_MAX_LABEL_TOKENS = 64


class Token(Record, frozen=True):
    """A piece of a query; equal tokens mean the same. ``text`` of a variable is its number."""

    kind: str
    text: str


COMMA = Token("operator", ",")


def tokenize(query: str) -> list[Token] | None:
    """Split a query, without blanks and comments; null if some text fits no token."""
    if len(query) > MAX_CHARS:
        return None
    tokens, position = [], 0
    while position < len(query):
        found = _TOKEN.match(query, position)
        if found is None or found.lastgroup == "unclosed":
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
    # Keys first, as the colon after a key does not start a label.
    keys, called = _map_keys(tokens), _called(tokens)
    names = keys | _labels(tokens, keys)
    result: list[Token] = []
    in_yield = False
    for index, token in enumerate(tokens):
        if token.kind in _WORDS:
            kind = "name" if index in names else _kind(tokens, index, called)
            if kind == "keyword":
                # In `YIELD label AS x` the procedure calls it `label`, and only `x` can be renamed.
                in_yield = token.text.upper() == "YIELD" or (in_yield and is_word(token, "AS"))
            elif kind == "variable" and in_yield and not is_word(token_at(tokens, index - 1), "AS"):
                kind = "yielded"
            # Case-insensitive in Cypher; functions of plug-ins (``apoc.…``) are not.
            text = token.text.upper() if kind in ("keyword", "command") else token.text
            token = Token(kind, text.lower() if kind == "function" else text)
        result.append(token)
    return result


def _kind(tokens: Sequence[Token], index: int, called: set[int]) -> str:
    token, before = tokens[index], token_at(tokens, index - 1)
    if is_operator(before, "."):
        return "plugin" if index in called else "name"
    if _is_keyword(token):
        return "keyword"
    if index in called or is_word(before, "CALL"):
        return "function" if is_operator(token_at(tokens, index + 1), "(", "{") else "plugin"
    # Two plain words in a row (`SHOW INDEXES`, `LOAD CSV`) are a command.
    around = (before, token_at(tokens, index + 1))
    is_command = any(t.kind in _WORDS and not _is_keyword(t) for t in around)
    return "command" if is_command else "variable"


def _map_keys(tokens: Sequence[Token]) -> set[int]:
    keys: set[int] = set()
    in_map = [False]  # for each open bracket, after a first entry for none
    for index, token in enumerate(tokens):
        before, after = token_at(tokens, index - 1), token_at(tokens, index + 1)
        between = is_operator(before, "{", ",") and is_operator(after, ":")
        if is_operator(token, "(", "[", "{"):
            in_map.append(token.text == "{" and before.text.upper() not in _BEFORE_SUBQUERY)
        elif is_operator(token, ")", "]", "}"):
            # Keep the first entry if there are too many closing brackets.
            del in_map[max(1, len(in_map) - 1) :]
        elif token.kind in _WORDS and between and in_map[-1]:
            keys.add(index)
    return keys


def _labels(tokens: Sequence[Token], keys: set[int]) -> set[int]:
    """Find the words of ``:A``, ``:A|B`` and ``:(A|!B)&C``; the colon of a map opens no label."""
    labels: set[int] = set()
    for index, token in enumerate(tokens):
        if token.kind in _WORDS:
            before = _skip_back(tokens, index - 1, "!", "(")
            joined = is_operator(token_at(tokens, before), "|", "&")
            joined = joined and _skip_back(tokens, before - 1, ")") in labels
            if joined or (is_operator(token_at(tokens, before), ":") and before - 1 not in keys):
                labels.add(index)
    return labels


def _skip_back(tokens: Sequence[Token], index: int, *operators: str) -> int:
    while is_operator(token_at(tokens, index), *operators):
        index -= 1
    return index


def _called(tokens: Sequence[Token]) -> set[int]:
    """Find the words of ``name.name.name(``, from right to left so that long chains stay cheap."""
    called: set[int] = set()
    # `a.b.c(`: c is called, so b is, so a is.
    for index in range(len(tokens) - 1, -1, -1):
        after = token_at(tokens, index + 1)
        subquery = is_operator(after, "{") and tokens[index].text.upper() in _BEFORE_SUBQUERY
        in_chain = is_operator(after, ".") and index + 2 in called
        if tokens[index].kind in _WORDS and (is_operator(after, "(") or subquery or in_chain):
            called.add(index)
    return called


def number_variables(tokens: Sequence[Token]) -> list[Token]:
    """Replace variables by their order of appearance; names that a procedure yields are kept."""
    fixed = {token.text for token in tokens if token.kind == "yielded"}
    numbers: dict[str, int] = {}
    result = []
    for token in tokens:
        if token.kind == "variable" and token.text in fixed:
            token = Token("yielded", token.text)
        elif token.kind == "variable":
            token = Token("variable", str(numbers.setdefault(token.text, len(numbers))))
        result.append(token)
    return result


def token_at(tokens: Sequence[Token], index: int) -> Token:
    return tokens[index] if 0 <= index < len(tokens) else Token("", "")


def is_operator(token: Token, *operators: str) -> bool:
    return token.kind == "operator" and token.text in operators


def bracket_step(token: Token) -> int:
    return is_operator(token, "(", "[", "{") - is_operator(token, ")", "]", "}")


def iter_outside_brackets(tokens: Sequence[Token]) -> Iterator[tuple[int, Token]]:
    level = 0
    for index, token in enumerate(tokens):
        step = bracket_step(token)
        if level == step == 0:
            yield index, token
        level += step


def split_at(tokens: Sequence[Token], separator: Token) -> list[list[Token]]:
    """Split at separators outside further brackets."""
    at = [index for index, token in iter_outside_brackets(tokens) if token == separator]
    return [list(tokens[a + 1 : b]) for a, b in pairwise([-1, *at, len(tokens)])]


def mask_variables(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    return [(t.kind, "" if t.kind in VARIABLES else t.text) for t in tokens]


def is_word(token: Token, keyword: str) -> bool:
    return token.kind == "word" and token.text.upper() == keyword


def _is_keyword(token: Token) -> bool:
    return token.kind == "word" and token.text.upper() in KEYWORDS


class Entity(Record, frozen=True, kw_only=True):
    """A node or relationship of a pattern; positions are token indices, ends exclusive.

    ``names`` are its labels or types; ``plain`` means only ``:``, ``|`` and ``&`` join them, so
    nothing is excluded. ``body`` is the content of its brackets.
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


def match_brackets(tokens: Sequence[Token]) -> dict[int, int]:
    pairs, closes = {}, {")": "(", "]": "[", "}": "{"}
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if is_operator(token, "(", "[", "{"):
            opened.append(index)
        elif is_operator(token, ")", "]", "}"):
            if opened and tokens[opened[-1]].text == closes[token.text]:
                pairs[opened.pop()] = index
            else:
                # Brackets around a mismatch are left unpaired.
                opened.clear()
    return pairs


def has_closed_brackets(tokens: Sequence[Token]) -> bool:
    n_brackets = sum(is_operator(token, *"()[]{}") for token in tokens)
    return n_brackets == 2 * len(match_brackets(tokens))


def find_paths(tokens: Sequence[Token]) -> list[Path]:
    """Find all path patterns; ``(a)`` alone, maybe an expression, needs MATCH, a label or keys."""
    closes = match_brackets(tokens)
    paths, index = [], 0
    while index < len(tokens):
        before = token_at(tokens, index - 1)
        # `f(a)` is a call.
        is_start = is_operator(tokens[index], "(") and before.kind not in _CALLED
        path = read_path(tokens, index, closes) if is_start else None
        index += 1
        if path is None:
            continue
        first, in_match = path.nodes[0], before == Token("keyword", "MATCH")
        if path.relationships or first.names or first.keys or in_match:
            paths.append(path)
            index = path.end
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
    if not is_operator(token_at(tokens, start), "(") or start not in closes:
        return None
    end = closes[start] + 1
    return _entity(tokens, (start, end), (start + 1, end - 1), closes, "")


def _relationship(tokens: Sequence[Token], start: int, closes: dict[int, int]) -> Entity | None:
    index, is_left = start, is_operator(token_at(tokens, start), "<")
    index += is_left
    if not is_operator(token_at(tokens, index), "-"):
        return None
    index += 1
    body = (index, index)
    if is_operator(token_at(tokens, index), "["):
        if index not in closes:
            return None
        body = (index + 1, closes[index])
        index = closes[index] + 1
    if not is_operator(token_at(tokens, index), "-"):
        return None
    is_right = is_operator(token_at(tokens, index + 1), ">")
    # `<-->` is `--`.
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
    labels: list[Token] = []
    if index < end and is_operator(tokens[index], ":"):
        parts = tokens[index : min(end, index + _MAX_LABEL_TOKENS)]
        labels = list(takewhile(lambda t: t.kind == "name" or is_operator(t, *":|&!()%"), parts))
        index += len(labels)
    has_length = index < end and is_operator(tokens[index], "*")  # `*`, `*2`, `*1..3`
    while has_length and index < end:
        if tokens[index].kind != "number" and not is_operator(tokens[index], "*", ".."):
            break
        index += 1
    keys = None
    if index < end and is_operator(tokens[index], "{") and index in closes:
        keys, index = (index, closes[index] + 1), closes[index] + 1
    is_condition = index < end and tokens[index] == Token("keyword", "WHERE")
    # Not a pattern, as in `(a + b)`.
    if index != end and not is_condition:
        return None
    return Entity(
        start=span[0],
        end=span[1],
        body=body,
        variable=variable,
        names=tuple(token.text for token in labels if token.kind == "name"),
        plain=not is_condition and not any(is_operator(token, "!", "%") for token in labels),
        keys=keys,
        has_length=has_length,
        direction=direction,
    )
