"""Write a comparison in one of its equal forms."""

from collections.abc import Sequence

from expertflow.evaluate.cypher.tokens import (
    Item,
    Token,
    as_group,
    is_operator,
    list_variables,
    mask_variables,
    token_at,
)

_MIRRORED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
# `NOT x < 1` and `x >= 1` differ where x is NaN, so only these have an opposite.
_OPPOSITE = {"=": "<>", "<>": "="}
_NOT = Token("keyword", "NOT")
_VALUE_WORDS = ("TRUE", "FALSE", "NULL")
# They bind more tightly than a comparison. A minus may be a relationship's.
_ARITHMETIC = (".", "+", "*", "/", "%", "^")


def compare_one_way(condition: list[Item], order: dict[str, int]) -> list[Item]:
    """Turn `5 < n.age` and `NOT n.x = 1` into one form; anything else is returned unchanged.

    ``order`` numbers the query's variables; it decides between `a.x = b.x` and `b.x = a.x`.
    """
    is_negated = condition[:1] == [_NOT]
    inner = condition[is_negated:]
    while len(inner) == 1 and (group := as_group(inner[0], "(")) is not None:
        inner = group.content
    found = [index for index, item in enumerate(inner) if is_operator(item, *_MIRRORED)]
    if len(found) != 1:
        return condition
    left, word, right = inner[: found[0]], inner[found[0]].text, inner[found[0] + 1 :]
    if not (_is_plain(left) and _is_plain(right)) or (is_negated and word not in _OPPOSITE):
        return condition
    word = _OPPOSITE[word] if is_negated else word
    ways = (
        [*left, Token("operator", word), *right],
        [*right, Token("operator", _MIRRORED[word]), *left],
    )
    return min(
        ways, key=lambda way: (mask_variables(way), [order[name] for name in list_variables(way)])
    )


def _is_plain(items: Sequence[Item]) -> bool:
    if is_operator(token_at(items, 0), "-") and token_at(items, 1).kind == "number":
        items = items[1:]
    # What begins with a bracket may be a path.
    is_path = as_group(token_at(items, 0), "(") is not None
    return (
        bool(items)
        and not is_path
        and all(
            (item.kind != "keyword" or item.text in _VALUE_WORDS)
            and (item.kind != "operator" or item.text in _ARITHMETIC)
            for item in items
        )
    )
