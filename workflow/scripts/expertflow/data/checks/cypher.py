"""Check that a field is one Cypher query, using graphglot's parser in its Neo4j dialect.

Tokens of Neo4j syntax that graphglot 0.14.3 lacks are first rewritten into ones that it parses;
each rule preserves validity, up to types: a number replaces what was removed. Known gaps: it
rejects ``LOAD CSV``, ``SHOW …`` and pattern arguments (``size((a)-->(b))``, dropped in Neo4j 5),
and accepts some GQL, such as ``INSERT``. Labels, functions and variables are not checked.
"""

import re
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from expertflow.core.records import Record
from expertflow.data.records import Fields
from expertflow.data.reject import Filtered, clip_message, why_too_hard
from expertflow.data.settings import FieldCheck

if TYPE_CHECKING:
    from graphglot.lexer.token import Token

# Parsing takes about 0.2 ms per character of dense arithmetic.
MAX_CHARS = 20_000
# A query must return or change something; graphglot also accepts a bare `MATCH (n)`.
_FINAL = "RETURN FINISH CREATE MERGE SET DELETE REMOVE FOREACH CALL INSERT DROP ALTER"
_FINAL_WORDS = frozenset(_FINAL.split())

# Parser steps per query, about a second: some nested or truncated queries take exponential time.
# Of 4,474 valid queries of text2cypher, 99 % take fewer than 1,900 and the worst 13,588;
# `NOT (NOT (NOT (NOT (1))))` is valid and needs too many.
MAX_STEPS = 50_000
_WANTED = re.compile(r"[,;.]?\s*[Ee]xpected one of \[[^\]]*\]")
_PLACE = re.compile(r"\s*Line (\d+), Col: (\d+)\.")
# Other errors that graphglot raises, on truncated queries and odd numbers (`1.e`).
_CRASHES = (
    *(ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError),
)
# Names of graphglot's token types, whose module takes long to import.
_OPENING = ("LEFT_PAREN", "LEFT_BRACKET", "LEFT_BRACE")
_CLOSING = ("RIGHT_PAREN", "RIGHT_BRACKET", "RIGHT_BRACE")
_SUBQUERIES = ("COUNT", "COLLECT_LIST")


def check_cypher(text: str, _: Fields, __: FieldCheck) -> None:
    if (fault := read_query(text).fault) is not None:
        raise Filtered("cypher_unparsable", fault)


class Reading(Record, frozen=True):
    """The parser's ``fault``, if any; where it ``gave_up``, the query may be valid."""

    fault: str | None = None
    gave_up: bool = False


def read_query(text: str) -> Reading:
    """Parse a text as one query, within ``MAX_STEPS`` parser steps."""
    from graphglot.error import GraphGlotError

    if (reason := why_too_hard(text, max_chars=MAX_CHARS)) is not None:
        return Reading(reason, gave_up=True)
    try:
        tokens, statements = _parse(text)
    except GraphGlotError as error:
        return Reading(_words(error))
    except RecursionError:
        return Reading("nested too deeply", gave_up=True)
    except StepLimitError:
        return Reading(f"gave up after {MAX_STEPS:,} parser steps", gave_up=True)
    except _CRASHES as error:
        return Reading(f"the parser crashes on it: {type(error).__name__}", gave_up=True)
    if statements != 1:
        return Reading(f"{statements} statements, expected one")
    if not any(token.text.upper() in _FINAL_WORDS for token in tokens):
        return Reading("it neither returns nor changes anything")
    return Reading()


class StepLimitError(Exception):
    """Stops parsing; not a graphglot error, since its parser would continue."""


def _parse(text: str) -> "tuple[list[Token], int]":
    from graphglot.dialect.base import Dialect

    dialect = Dialect.get_or_raise("neo4j")
    parser: Any = dialect.parser()
    attempt, n_steps = parser.try_parse, count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        # It is nested attempts at alternatives that take exponential time.
        if next(n_steps) > MAX_STEPS:
            raise StepLimitError
        return attempt(*args, **kwargs)

    def parse_subquery(braces: "list[Token]") -> None:
        # graphglot parses EXISTS { … }, which may contain the same as COUNT { … }.
        head, tail = map(dialect.tokenize, ("MATCH (n) WHERE EXISTS", "RETURN 1"))
        parser.parse([*head, *braces, *tail], "")

    parser.try_parse = counted
    tokens = dialect.tokenize(text)
    trees = parser.parse(_adapt_tokens(tokens, parse_subquery), "")
    return tokens, sum(tree is not None for tree in trees)


def _words(error: Exception) -> str:
    """Return the first line of graphglot's message, location first; the rest quotes the query."""
    first = next(iter(str(error).splitlines()), "")
    # The list of expected tokens has no fixed order.
    first = _WANTED.sub("", first)
    place = _PLACE.search(first)
    if place is None:
        return clip_message(first)
    return f"near line {place[1]}, column {place[2]}: {clip_message(first[: place.start()])}"


def _adapt_tokens(
    tokens: "list[Token]", parse_subquery: "Callable[[list[Token]], None]"
) -> "list[Token]":
    """Replace names, map projections, ``COUNT { … }`` and ``COLLECT { … }``, innermost first.

    ``parse_subquery`` gets the braces of each subquery and raises if they do not parse.
    """
    result: list[Token] = []
    opened: list[int] = []
    followers = [*(token.token_type.name for token in tokens[1:]), None]
    for token, after in zip(tokens, followers, strict=True):
        if token.token_type.name == "SIZE" and after != "LEFT_PAREN":
            # A plain name unless it calls a function: ``n.size AS size``.
            token = _like(token, "VAR", token.text)
        if token.token_type.name == "LEFT_BRACE":
            opened.append(len(result))
        result.append(token)
        if token.token_type.name == "RIGHT_BRACE" and opened and (start := opened.pop()):
            word, braces = result[start - 1], result[start:]
            if word.token_type.name in _SUBQUERIES:
                parse_subquery(braces)
                # A number is valid wherever a subquery is.
                result[start - 1 :] = [_like(word, "NUMBER", "1")]
            elif word.token_type.name == "VAR":
                result[start - 1 :] = _without_projection(word, braces)
    return result


def _without_projection(word: "Token", braces: "list[Token]") -> "list[Token]":
    """Turn ``n {.a, .*, b}`` into ``{a: 1, all: 1, b: 1}``."""
    items = _items(braces[1:-1])
    if not any(item and item[0].token_type.name == "PERIOD" for item in items):
        return [word, *braces]
    result = []
    for item in items:
        is_dotted = len(item) == 2 and item[0].token_type.name == "PERIOD"
        if is_dotted or [token.token_type.name for token in item] == ["VAR"]:
            name = "all" if item[-1].text == "*" else item[-1].text
            pair = (("VAR", name), ("COLON", ":"), ("NUMBER", "1"))
            item = [_like(item[-1], kind, text) for kind, text in pair]
        result += [_like(braces[0], "COMMA", ","), *item]
    return [braces[0], *result[1:], braces[-1]]


def _items(tokens: "list[Token]") -> "list[list[Token]]":
    items: list[list[Token]] = [[]]
    level = 0
    for token in tokens:
        level += (token.token_type.name in _OPENING) - (token.token_type.name in _CLOSING)
        if token.token_type.name == "COMMA" and level == 0:
            items.append([])
        else:
            items[-1].append(token)
    return items


def _like(token: "Token", name: str, text: str) -> "Token":
    kind = type(token.token_type)[name]
    return type(token)(kind, text, token.line, token.col, token.start, token.end)
