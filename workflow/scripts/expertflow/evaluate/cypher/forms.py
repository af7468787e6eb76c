"""Reduce Cypher queries to a common form by steps that preserve their meaning.

Two queries of the same form return the same rows on every graph, up to column names and the order
that the query leaves open. The converse does not hold. The steps, on a legal query:

- ``{k: v}`` of a node or one-hop relationship in MATCH becomes ``WHERE x.k = v``
- conditions that AND joins in a WHERE, and the keys of a map in a pattern, are sorted
- a variable named only once, in a pattern, is dropped
- ``(b)<-[:R]-(a)`` becomes ``(a)-[:R]->(b)``; longer paths take one of their two directions
- one of ``5 < n.age`` and ``n.age > 5`` is chosen; ``NOT n.x = 1`` becomes ``n.x <> 1``
- ``count(n)`` becomes ``count(*)`` if no row lacks the node or relationship
- ``AS name`` of the last RETURN is dropped and replaced in ORDER BY; so is ``ASC``

With a ``*`` projection nothing changes, since each variable is part of the answer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import count, pairwise

from expertflow.evaluate.cypher.tokens import (
    AS,
    COMMA,
    MATCH,
    VARIABLES,
    WHERE,
    Item,
    Path,
    Token,
    TokenGroup,
    as_group,
    ends_clause,
    find_paths,
    flatten,
    group_brackets,
    is_operator,
    iter_levels,
    list_rebound,
    list_variables,
    mask_variables,
    number_variables,
    split_at,
    token_at,
)

Items = list[Item]

_AND, _BY, _DISTINCT, _RETURN, _UNION, _WITH = (
    Token("keyword", word) for word in ("AND", "BY", "DISTINCT", "RETURN", "UNION", "WITH")
)
_OPEN, _CLOSE, _DOT, _EQUALS, _BAR, _STAR = (Token("operator", text) for text in "().=|*")
_COUNT = Token("function", "count")
_ASCENDING = (Token("keyword", "ASC"), Token("keyword", "ASCENDING"))
# With one of these, AND does not simply join conditions.
_NOT_A_CONJUNCTION = frozenset({"OR", "XOR", "CASE", "WHEN", "THEN", "ELSE", "END"})
_VALUES = VARIABLES | {"string", "number", "parameter"}
_LITERALS = (Token("keyword", "TRUE"), Token("keyword", "FALSE"))
# Each call returns a different value.
_FRESH_EACH_TIME = (Token("function", "rand"), Token("function", "randomuuid"))
_TURNED = {"<": Token("operator", ">"), ">": Token("operator", "<")}

_MIRRORED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
# `NOT x < 1` and `x >= 1` differ if x is NaN, so only these have an opposite.
_OPPOSITE = {"=": "<>", "<>": "="}
_NOT = Token("keyword", "NOT")
# These operators bind more tightly than a comparison. A minus may be a relationship's.
_PLAIN = {"keyword": ("TRUE", "FALSE", "NULL"), "operator": (".", "+", "*", "/", "%", "^")}


def common_form(tokens: Sequence[Token]) -> list[Token]:
    # `RETURN *` and `WITH DISTINCT *`, but not `count(*)` or `a * b`.
    projects_all = any(
        token == _STAR and token_at(tokens, index - 1) in (_RETURN, _WITH, _DISTINCT)
        for index, token in enumerate(tokens)
    )
    # A query that parses has balanced brackets.
    items = group_brackets([t for t in tokens if projects_all or t not in _ASCENDING]) or []
    if not projects_all:
        _drop_column_names(items)
        _move_maps_to_conditions(items)
    paths = find_paths(items)
    _sort_keys(paths)
    if not projects_all:
        # Before unused variables are dropped: `count(n)` may be the only other use of n.
        _count_rows_one_way(items, paths)
        _drop_unused_variables(items, paths)
    _turn_paths(paths)
    _sort_conditions(items)
    # Last, because a variable's number is its position among those that remain.
    return number_variables(list(flatten(items)))


def _move_maps_to_conditions(items: Items) -> None:
    """Turn `(:P {k: 1})-->(b)` into `(x:P)-->(b)` and the condition `x.k = 1`."""
    fresh_names = (f"\0{number}" for number in count())  # no legal variable names
    for level, start, end in _iter_clauses(items, MATCH):
        words = level[start:end]
        # Not those within brackets, such as shortestPath's.
        paths = [path for path in find_paths(words) if path.items is words]
        conditions, after = _take_conditions(paths, fresh_names), end
        if token_at(level, end) == WHERE:
            after = _end_of_clause(level, end + 1)
            condition = level[end + 1 : after]
            parts = _conjunction(condition)
            # `a OR b` next to another condition needs brackets.
            if parts is None and conditions:
                parts = [[TokenGroup([_OPEN, *condition, _CLOSE])]]
            conditions += parts or [condition]
        if conditions:
            level[end:after] = [WHERE, *_join(conditions, _AND)]


def _iter_clauses(items: Items, keyword: Token) -> Iterator[tuple[Items, int, int]]:
    """Yield where the words after a keyword are, backwards, so that earlier indices stay valid."""
    # Inner clauses first, because they are part of the outer ones.
    for level in reversed(list(iter_levels(items))):
        for index in reversed(range(len(level))):
            if level[index] == keyword:
                yield level, index + 1, _end_of_clause(level, index + 1)


def _take_conditions(paths: list[Path], fresh_names: Iterator[str]) -> list[Items]:
    conditions: list[Items] = []
    for entity in (entity for path in paths for entity in path.entities):
        if entity.keys is None or entity.group is None or entity.has_length:
            continue
        pairs = split_at(entity.keys.content, COMMA)
        if any(len(pair) != 3 for pair in pairs):
            continue
        if not all(value.kind in _VALUES or value in _LITERALS for _, _, value in pairs):
            continue
        entity.group.items.remove(entity.keys)
        name = entity.variable
        if name is None:
            name = next(fresh_names)
            entity.group.items.insert(1, Token("variable", name))
        head = [Token("variable", name), _DOT]
        conditions += [[*head, key, _EQUALS, value] for key, _, value in pairs]
    return conditions


def _conjunction(items: Items) -> list[Items] | None:
    """Split at AND; null if the items are not a plain conjunction."""
    words = {item.text for item in items if item.kind == "keyword"}
    return None if words & _NOT_A_CONJUNCTION else split_at(items, _AND)


def _sort_conditions(items: Items) -> None:
    # The order in which variables appear decides between `a.x = b.x` and `b.x = a.x`.
    order = {name: number for number, name in enumerate(dict.fromkeys(list_variables(items)))}
    for level, start, end in _iter_clauses(items, WHERE):
        condition = level[start:end]
        parts = _conjunction(condition)
        # A list's bar begins another expression; the bar of labels looks the same.
        if parts is not None and _BAR not in condition:
            same_way = [_compare_one_way(part, order) for part in parts]
            level[start:end] = _join(sorted(same_way, key=mask_variables), _AND)


def _compare_one_way(condition: list[Item], order: dict[str, int]) -> list[Item]:
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
    # Anything that begins with a bracket may be a path.
    if not items or as_group(items[0], "(") is not None:
        return False
    return all(item.kind not in _PLAIN or item.text in _PLAIN[item.kind] for item in items)


def _sort_keys(paths: list[Path]) -> None:
    for keys in (entity.keys for path in paths for entity in path.entities):
        if keys is not None:
            parts = sorted(split_at(keys.content, COMMA), key=mask_variables)
            keys.items[1:-1] = _join(parts, COMMA)


def _count_rows_one_way(items: Items, paths: list[Path]) -> None:
    """Replace `count(n)` by `count(*)` for variables that are null in no row."""
    tokens = list(flatten(items))
    # OPTIONAL MATCH and procedures may set a variable to null.
    if any(t.kind == "keyword" and t.text in ("OPTIONAL", "CALL") for t in tokens):
        return
    matched = {
        entity.variable
        for path in paths
        for entity in path.entities
        if path.in_match and not entity.has_length
    }
    for level in iter_levels(items):
        for before, call in pairwise(level):
            if before == _COUNT and isinstance(call, TokenGroup) and len(call.content) == 1:
                counted = call.content[0]
                if counted.kind == "variable" and counted.text in matched - list_rebound(tokens):
                    call.items[1] = _STAR


def _drop_unused_variables(items: Items, paths: list[Path]) -> None:
    # In a condition an otherwise unnamed variable would be a mistake, so it is kept.
    counts = Counter(list_variables(items))
    for entity in (entity for path in paths if path.in_match for entity in path.entities):
        if entity.group is not None and entity.variable and counts[entity.variable] == 1:
            del entity.group.items[1]
            entity.variable = None


def _turn_paths(paths: list[Path]) -> None:
    for path in paths:
        # Named paths, shortest paths, repeated parts and lists of relationships are directed.
        before, after = token_at(path.items, path.start - 1), token_at(path.items, path.end)
        is_whole = before.kind == "keyword" or is_operator(before, *",[{")
        is_whole &= after.kind in ("keyword", "") or is_operator(after, *",]}|")
        is_list = any(r.has_length and r.variable is not None for r in path.relationships)
        if is_whole and not is_list:
            way = path.items[path.start : path.end]
            # `(a)-[:R]->(b)<-[:S]-(c)` becomes `(c)-[:S]->(b)<-[:R]-(a)`.
            turned = [_TURNED.get(item.text, item) for item in reversed(way)]
            path.items[path.start : path.end] = min(way, turned, key=mask_variables)


def _drop_column_names(items: Items) -> None:
    returns = [index for index, item in enumerate(items) if item == _RETURN]
    words = [*flatten(items)]
    # UNION pairs columns by name, so there a name is part of the answer.
    if not returns or _UNION in words or any(t in _FRESH_EACH_TIME for t in words):
        return
    start = returns[-1] + 1
    start += token_at(items, start) == _DISTINCT
    end = _end_of_clause(items, start)
    columns = split_at(items[start:end], COMMA)
    named = [column for column in columns if column[-2:-1] == [AS]]
    stands_for = {column[-1].text: column[:-2] for column in named}
    short = [column[:-2] if column in named else column for column in columns]
    items[start:] = [*_join(short, COMMA), *_replace_names(items[end:], stands_for)]


def _replace_names(items: Items, stands_for: dict[str, Items]) -> Items:
    """Replace the names of columns in ORDER BY, in brackets unless one is the complete key."""
    result: Items = []
    for index, item in enumerate(items):
        if isinstance(item, TokenGroup):
            content = _replace_names(item.content, stands_for)
            result.append(TokenGroup([item.items[0], *content, item.items[-1]]))
        elif item.kind in VARIABLES and item.text in stands_for:
            column = deepcopy(stands_for[item.text])
            before, after = token_at(items, index - 1), token_at(items, index + 1)
            is_key = before in (_BY, COMMA) and (after == COMMA or after.kind in ("keyword", ""))
            result += column if is_key else [TokenGroup([_OPEN, *column, _CLOSE])]
        else:
            result.append(item)
    return result


def _end_of_clause(items: Items, start: int) -> int:
    return next((at for at in range(start, len(items)) if ends_clause(items, at)), len(items))


def _join(parts: Sequence[Items], separator: Token) -> Items:
    return [item for part in parts for item in (separator, *part)][1:]
