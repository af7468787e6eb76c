"""Reduce Cypher queries to a common form by steps that preserve their meaning.

Two queries of the same form return the same rows on every graph, up to column names and the order
that the query leaves open. The converse does not hold. The steps, on a legal query:

- ``{k: v}`` of a node or one-hop relationship in MATCH becomes ``WHERE x.k = v``
- conditions that AND joins in a WHERE, and the keys of a map in a pattern, are sorted
- a variable named only once, in a pattern, is dropped
- ``(b)<-[:R]-(a)`` becomes ``(a)-[:R]->(b)``; longer paths take one of their two directions
- of ``5 < n.age`` and ``n.age > 5`` one is taken; ``NOT n.x = 1`` becomes ``n.x <> 1``
- ``count(n)`` becomes ``count(*)`` where no row lacks the node or relationship
- ``AS name`` of the last RETURN is dropped and replaced in ORDER BY; so is ``ASC``

With a ``*`` projection nothing changes, since each variable is part of the answer.
"""

from collections import Counter
from collections.abc import Sequence

from expertflow.evaluate.cypher import comparisons
from expertflow.evaluate.cypher.tokens import (
    COMMA,
    VARIABLES,
    Entity,
    Path,
    Token,
    bracket_step,
    find_paths,
    is_operator,
    iter_outside_brackets,
    mask_variables,
    match_brackets,
    number_variables,
    read_path,
    split_at,
    token_at,
)

Tokens = list[Token]

_AND, _AS, _BY, _DISTINCT, _MATCH, _RETURN, _UNION, _WHERE = (
    Token("keyword", word)
    for word in ("AND", "AS", "BY", "DISTINCT", "MATCH", "RETURN", "UNION", "WHERE")
)
_OPEN, _CLOSE = Token("operator", "("), Token("operator", ")")
_CLAUSES = """
    CALL CREATE DELETE DETACH FOREACH LIMIT MATCH MERGE OPTIONAL ORDER REMOVE RETURN SET SKIP UNION
    UNWIND WHERE WITH
"""
_CLAUSE_WORDS = frozenset(_CLAUSES.split())
# With one of these, AND does not simply join conditions.
_NOT_A_CONJUNCTION = frozenset({"OR", "XOR", "CASE", "WHEN", "THEN", "ELSE", "END"})
_VALUES = frozenset({"string", "number", "parameter", "variable"})
_LITERALS = (Token("keyword", "TRUE"), Token("keyword", "FALSE"))
# Each call returns another value.
_FRESH_EACH_TIME = frozenset({"rand", "randomuuid"})


def common_form(tokens: Sequence[Token]) -> Tokens:
    result = list(tokens)
    if not _projects_all(result):
        result = _without_column_names(result)
        result = _with_conditions_outside(result)
    result = _sort_keys(result)
    if not _projects_all(result):
        # Before unused variables are dropped: `count(n)` may be the only other use of n.
        result = comparisons.count_rows_one_way(
            result, comparisons.variables_never_null(result, _matched_variables(result))
        )
        result = _without_unused_variables(result)
    # Last, as a variable's number is its position among those that remain.
    return number_variables(_sort_conditions(_turn_paths(result)))


def _projects_all(tokens: Tokens) -> bool:
    # `RETURN *` and `WITH DISTINCT *`; neither `count(*)` nor `a * b`.
    before = [Token("keyword", word) for word in ("RETURN", "WITH", "DISTINCT")]
    return any(
        is_operator(t, "*") and token_at(tokens, i - 1) in before for i, t in enumerate(tokens)
    )


def _with_conditions_outside(tokens: Tokens) -> Tokens:
    result, n_new = list(tokens), 0
    # Backwards, so that earlier positions stay valid.
    for start in reversed([i for i, token in enumerate(tokens) if token == _MATCH]):
        end = _end_of_clause(result, start + 1)
        pattern = result[start + 1 : end]
        paths = _all_paths(pattern)
        if paths is None:
            continue
        pattern, conditions, n_new = _split_maps(pattern, paths, n_new)
        after = end
        if token_at(result, end) == _WHERE:
            after = _end_of_clause(result, end + 1)
            parts = _conjunction(result[end + 1 : after])
            # `a OR b` beside another condition needs brackets.
            if parts is None and conditions:
                parts = [[_OPEN, *result[end + 1 : after], _CLOSE]]
            conditions = conditions + (parts or [result[end + 1 : after]])
        result[start + 1 : after] = [*pattern, *_where(conditions)]
    return result


def _where(conditions: list[Tokens]) -> Tokens:
    return [_WHERE, *_join(conditions, _AND)] if conditions else []


def _all_paths(tokens: Tokens) -> list[Path] | None:
    """Parse ``name = path, path, …``; null for anything else."""
    closes, paths, index = match_brackets(tokens), [], 0
    while index < len(tokens):
        if tokens[index].kind in VARIABLES and is_operator(token_at(tokens, index + 1), "="):
            index += 2
        path = read_path(tokens, index, closes)
        if path is None or (path.end < len(tokens) and tokens[path.end] != COMMA):
            return None
        paths.append(path)
        index = path.end + 1
    return paths


def _entities(paths: list[Path]) -> list[Entity]:
    return [entity for path in paths for entity in (*path.nodes, *path.relationships)]


# `(:P {k: 1})-->(b)` becomes `(x:P)-->(b)` and the condition `x.k = 1`.
def _split_maps(tokens: Tokens, paths: list[Path], n_new: int) -> tuple[Tokens, list[Tokens], int]:
    pattern: Tokens = []
    conditions: list[Tokens] = []
    position = 0
    for entity in sorted(_entities(paths), key=lambda entity: entity.start):
        if entity.keys is None or entity.has_length:
            continue
        if (pairs := _pairs(tokens, entity.keys)) is None:
            continue
        pattern += tokens[position : entity.body[0]]
        position = entity.body[0]
        name = entity.variable
        if name is None:
            name, n_new = f"\0{n_new}", n_new + 1  # no legal variable name
            pattern.append(Token("variable", name))
        pattern += tokens[position : entity.keys[0]]
        position = entity.keys[1]
        head = [Token("variable", name), Token("operator", ".")]
        conditions += [[*head, key, Token("operator", "="), value] for key, value in pairs]
    return pattern + tokens[position:], conditions, n_new


def _pairs(tokens: Tokens, keys: tuple[int, int]) -> list[tuple[Token, Token]] | None:
    """Parse ``{key: value, …}``; null if a value is more than one token."""
    pairs = []
    for item in split_at(tokens[keys[0] + 1 : keys[1] - 1], COMMA):
        if len(item) != 3 or item[0].kind != "name" or not is_operator(item[1], ":"):
            return None
        if item[2].kind not in _VALUES and item[2] not in _LITERALS:
            return None
        pairs.append((item[0], item[2]))
    return pairs


def _conjunction(tokens: Sequence[Token]) -> list[Tokens] | None:
    """Split at AND; null if the tokens are not a plain conjunction."""
    words = {token.text for _, token in iter_outside_brackets(tokens) if token.kind == "keyword"}
    return None if words & _NOT_A_CONJUNCTION else split_at(tokens, _AND)


def _sort_conditions(tokens: Tokens) -> Tokens:
    result = list(tokens)
    # The order in which variables appear decides between `a.x = b.x` and `b.x = a.x`.
    names = dict.fromkeys(token.text for token in tokens if token.kind in VARIABLES)
    order = {name: number for number, name in enumerate(names)}
    for start in reversed([i for i, token in enumerate(tokens) if token == _WHERE]):
        end = _end_of_clause(result, start + 1)
        parts = _conjunction(result[start + 1 : end])
        # A list's bar begins another expression; the bar of labels looks the same.
        has_bar = len(split_at(result[start + 1 : end], Token("operator", "|"))) > 1
        if parts is not None and not has_bar:
            same_way = [comparisons.compare_one_way(part, order) for part in parts]
            result[start:end] = _where(sorted(same_way, key=mask_variables))
    return result


def _sort_keys(tokens: Tokens) -> Tokens:
    result = list(tokens)
    for entity in _entities(find_paths(tokens)):
        if entity.keys is not None:
            first, last = entity.keys[0] + 1, entity.keys[1] - 1
            parts = sorted(split_at(tokens[first:last], COMMA), key=mask_variables)
            result[first:last] = _join(parts, COMMA)
    return result


def _without_unused_variables(tokens: Tokens) -> Tokens:
    counts = Counter(token.text for token in tokens if token.kind in VARIABLES)
    unused = {
        entity.body[0]
        for entity in _entities(find_paths(tokens))
        if entity.variable is not None and counts[entity.variable] == 1
    }
    # In a condition an otherwise unnamed variable would be a mistake, so it is kept.
    unused &= _match_positions(tokens)
    return [token for index, token in enumerate(tokens) if index not in unused]


def _match_positions(tokens: Tokens) -> set[int]:
    return {
        index
        for start in (i for i, token in enumerate(tokens) if token == _MATCH)
        for index in range(start + 1, _end_of_clause(tokens, start + 1))
    }


def _matched_variables(tokens: Tokens) -> set[str]:
    """Return the variables of single nodes and relationships that a MATCH finds."""
    where = _match_positions(tokens)
    return {
        entity.variable
        for entity in _entities(find_paths(tokens))
        if entity.variable is not None and not entity.has_length and entity.start in where
    }


def _turn_paths(tokens: Tokens) -> Tokens:
    result = list(tokens)
    for path in find_paths(tokens):
        # Named paths, shortest paths, repeated parts and lists of relationships are directed.
        before, after = token_at(tokens, path.start - 1), token_at(tokens, path.end)
        is_whole = before.kind == "keyword" or is_operator(before, *",[{")
        is_whole &= after.kind in ("keyword", "") or is_operator(after, *",]}|")
        is_list = any(r.has_length and r.variable is not None for r in path.relationships)
        if is_whole and not is_list:
            ways = (tokens[path.start : path.end], _turned(tokens, path))
            result[path.start : path.end] = sorted(ways, key=mask_variables)[0]
    return result


# `(a)-[:R]->(b)<-[:S]-(c)` becomes `(c)-[:S]->(b)<-[:R]-(a)`.
def _turned(tokens: Tokens, path: Path) -> Tokens:
    minus, left, right = (Token("operator", text) for text in "-<>")
    result = list(tokens[path.nodes[-1].start : path.nodes[-1].end])
    pairs = zip(path.nodes[:-1], path.relationships, strict=True)
    for node, relationship in reversed(list(pairs)):
        body = tokens[relationship.body[0] : relationship.body[1]]
        if is_operator(token_at(tokens, relationship.body[0] - 1), "["):
            body = [Token("operator", "["), *body, Token("operator", "]")]
        words = tokens[relationship.start : relationship.end]
        is_left, is_right = words[0] == left, words[-1] == right
        result += [left] * is_right + [minus, *body, minus] + [right] * is_left
        result += tokens[node.start : node.end]
    return result


def _without_column_names(tokens: Tokens) -> Tokens:
    tokens = [t for t in tokens if t.kind != "keyword" or t.text not in ("ASC", "ASCENDING")]
    returns = [index for index, token in iter_outside_brackets(tokens) if token == _RETURN]
    # UNION pairs columns by name, so there a name is part of the answer.
    if not returns or any(t == _UNION for t in tokens):
        return tokens
    start = returns[-1] + 1
    start += token_at(tokens, start) == _DISTINCT
    end = _end_of_clause(tokens, start)
    items = split_at(tokens[start:end], COMMA)
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
    return [*tokens[:start], *_join(short, COMMA), *tail]


def _put_in_order(tail: Tokens, stands_for: dict[str, Tokens]) -> Tokens | None:
    """Replace aliases in ORDER BY; null if one is part of a longer expression."""
    if tail[1:2] != [_BY]:
        return None if any(t.text in stands_for and t.kind in VARIABLES for t in tail) else tail
    end = _end_of_clause(tail, 2)
    result = tail[:2]
    for index, item in enumerate(split_at(tail[2:end], COMMA)):
        head, rest = item[:1], item[1:]
        is_alias = bool(head) and head[0].kind in VARIABLES and head[0].text in stands_for
        if is_alias and not all(t.kind == "keyword" for t in rest):
            return None
        if any(t.kind in VARIABLES and t.text in stands_for for t in rest):
            return None
        result += [COMMA] if index else []
        result += [*stands_for[head[0].text], *rest] if is_alias else item
    return result + tail[end:]


def _end_of_clause(tokens: Tokens, start: int) -> int:
    level = 0
    for index in range(start, len(tokens)):
        level += bracket_step(tokens[index])
        if level < 0:
            return index
        token, before = tokens[index], token_at(tokens, index - 1)
        opens_clause = token.kind == "keyword" and token.text in _CLAUSE_WORDS
        # In `STARTS WITH` it opens no clause.
        opens_clause &= token.text != "WITH" or before.text not in ("STARTS", "ENDS")
        if level == 0 and (opens_clause or is_operator(token, ";")):
            return index
    return len(tokens)


def _join(parts: Sequence[Tokens], separator: Token) -> Tokens:
    return [word for part in parts for word in (separator, *part)][1:]
