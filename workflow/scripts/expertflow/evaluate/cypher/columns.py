"""Drop the names of a query's columns, which are no part of its answer."""

from expertflow.evaluate.cypher.clauses import COMMA, VARIABLES, Tokens, end_of_clause, split
from expertflow.evaluate.cypher.paths import closing_brackets
from expertflow.evaluate.cypher.tokens import Token, at

_AS, _BY, _RETURN = (Token("keyword", word) for word in ("AS", "BY", "RETURN"))
_DISTINCT, _UNION = Token("keyword", "DISTINCT"), Token("keyword", "UNION")
# Two calls of these are two values.
_FRESH_EACH_TIME = frozenset({"rand", "randomuuid"})


def without_column_names(tokens: Tokens) -> Tokens:
    """Drop the names of the last RETURN's columns where nothing depends on them."""
    tokens = [t for t in tokens if t.kind != "keyword" or t.text not in ("ASC", "ASCENDING")]
    closes, returns, index = closing_brackets(tokens), [], 0
    while index < len(tokens):
        if tokens[index] == _RETURN:
            returns.append(index)
        index = closes.get(index, index) + 1
    if not returns or any(t == _UNION for t in tokens):
        return tokens
    start = returns[-1] + 1
    start += at(tokens, start) == _DISTINCT
    end = end_of_clause(tokens, start)
    items = split(tokens[start:end], COMMA)
    others = [*tokens[: returns[-1]], *(token for item in items for token in item[:-1])]
    known = {token.text for token in others if token.kind in VARIABLES}
    stands_for: dict[str, Tokens] = {}
    for item in items:
        if len(item) > 2 and item[-2] == _AS and item[-1].kind in VARIABLES:
            stands_for[item[-1].text] = item[:-2]
    tail = _put_in_order(tokens[end:], stands_for)
    repeated = any(t.kind == "function" and t.text in _FRESH_EACH_TIME for t in tokens)
    if tail is None or repeated or known & set(stands_for):
        return tokens
    short = [item[:-2] if len(item) > 2 and item[-2] == _AS else item for item in items]
    joined = [word for item in short for word in (COMMA, *item)][1:]
    return [*tokens[:start], *joined, *tail]


def _put_in_order(tail: Tokens, stands_for: dict[str, Tokens]) -> Tokens | None:
    """Replace aliases in ORDER BY; nothing where one is part of a longer expression."""
    if tail[1:2] != [_BY]:
        return None if any(t.text in stands_for and t.kind in VARIABLES for t in tail) else tail
    end = end_of_clause(tail, 2)
    result = tail[:2]
    for index, item in enumerate(split(tail[2:end], COMMA)):
        head, rest = item[:1], item[1:]
        is_alias = bool(head) and head[0].kind in VARIABLES and head[0].text in stands_for
        if is_alias and not all(t.kind == "keyword" for t in rest):
            return None
        if any(t.kind in VARIABLES and t.text in stands_for for t in rest):
            return None
        result += [COMMA] if index else []
        result += [*stands_for[head[0].text], *rest] if is_alias else item
    return result + tail[end:]
