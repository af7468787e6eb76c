"""Write a comparison, and a count of rows, in one of its equal forms."""

from collections.abc import Sequence

from expertflow.evaluate.cypher.tokens import (
    VARIABLES,
    Token,
    is_operator,
    iter_outside_brackets,
    mask_variables,
    match_brackets,
    token_at,
)

_MIRRORED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
# `NOT x < 1` and `x >= 1` differ where x is NaN, so only these have an opposite.
_OPPOSITE = {"=": "<>", "<>": "="}
_NOT = Token("keyword", "NOT")
_VALUE_WORDS = ("TRUE", "FALSE", "NULL")
# They bind more tightly than a comparison. A minus may be a relationship's.
_ARITHMETIC = (".", "+", "*", "/", "%", "^")


def compare_one_way(condition: list[Token], order: dict[str, int]) -> list[Token]:
    """Turn `5 < n.age` and `NOT n.x = 1` into one form; anything else is returned unchanged.

    ``order`` numbers the query's variables; it decides between `a.x = b.x` and `b.x = a.x`.
    """
    is_negated = condition[:1] == [_NOT]
    inner = _without_brackets(condition[is_negated:])
    at = _position(inner)
    if at is None or (is_negated and inner[at].text not in _OPPOSITE):
        return condition
    word = _OPPOSITE[inner[at].text] if is_negated else inner[at].text
    left, right = inner[:at], inner[at + 1 :]
    ways = (
        [*left, Token("operator", word), *right],
        [*right, Token("operator", _MIRRORED[word]), *left],
    )
    return min(
        ways,
        key=lambda way: (mask_variables(way), [order[t.text] for t in way if t.kind in VARIABLES]),
    )


def _without_brackets(tokens: list[Token]) -> list[Token]:
    while (
        is_operator(token_at(tokens, 0), "(") and match_brackets(tokens).get(0) == len(tokens) - 1
    ):
        tokens = tokens[1:-1]
    return tokens


def _position(tokens: Sequence[Token]) -> int | None:
    """Return where the only comparison between two plain values is; null if there is none."""
    found = [i for i, token in iter_outside_brackets(tokens) if is_operator(token, *_MIRRORED)]
    if len(found) != 1:
        return None
    return found[0] if _is_plain(tokens[: found[0]]) and _is_plain(tokens[found[0] + 1 :]) else None


def _is_plain(tokens: Sequence[Token]) -> bool:
    if is_operator(token_at(tokens, 0), "-") and token_at(tokens, 1).kind == "number":
        tokens = tokens[1:]
    # What begins with a bracket may be a path.
    return (
        bool(tokens)
        and not is_operator(tokens[0], "(")
        and all(
            (token.kind != "keyword" or token.text in _VALUE_WORDS)
            and (token.kind != "operator" or token.text in _ARITHMETIC)
            for _, token in iter_outside_brackets(tokens)
        )
    )


def count_rows_one_way(tokens: Sequence[Token], never_null: set[str]) -> list[Token]:
    """Replace `count(n)` by `count(*)` for variables that are null in no row."""
    result = list(tokens)
    for index in range(2, len(tokens) - 1):
        # The tokens of a call are `count`, `(`, the variable and `)`.
        call = tokens[index - 2 : index]
        named = tokens[index].kind == "variable" and tokens[index].text in never_null
        closed = is_operator(tokens[index + 1], ")")
        if named and closed and call == [Token("function", "count"), Token("operator", "(")]:
            result[index] = Token("operator", "*")
    return result


def variables_never_null(tokens: Sequence[Token], matched: set[str]) -> set[str]:
    """Return the ``matched`` variables to which nothing else, such as UNWIND, gives a value."""
    words = {token.text for token in tokens if token.kind == "keyword"}
    # OPTIONAL MATCH and procedures may set a variable to null.
    if words & {"OPTIONAL", "CALL"}:
        return set()
    named = {
        token.text
        for index, token in enumerate(tokens)
        if token_at(tokens, index - 1) == Token("keyword", "AS")
        or token_at(tokens, index + 1) == Token("keyword", "IN")
    }
    return matched - named
