"""Bring queries that ask the same to one form, by steps that each keep what a query asks.

Two queries of the same form return the same rows on every graph, up to the names of columns and
the order that the query leaves open. The converse does not hold. The steps, on a legal query:

- ``{k: v}`` of a node, or of a relationship of one hop, in MATCH becomes ``WHERE x.k = v``
- the conditions of a WHERE that AND joins, and the keys of a map in a pattern, are sorted
- a variable that is named once, in a pattern, is dropped
- ``(b)<-[:R]-(a)`` becomes ``(a)-[:R]->(b)``; longer paths take one of their two directions
- ``AS name`` of the last RETURN is dropped, and ORDER BY takes what it stood for; so is ``ASC``

With ``*`` as a projection nothing is changed, since each variable is part of the answer then.
"""

from collections import Counter
from collections.abc import Sequence

from expertflow.evaluate.cypher.clauses import COMMA, VARIABLES, Tokens, end_of_clause, split
from expertflow.evaluate.cypher.columns import without_column_names
from expertflow.evaluate.cypher.paths import Path, closing_brackets, find_paths, read_path
from expertflow.evaluate.cypher.tokens import Token, at, is_operator, number_variables

_AND, _MATCH, _WHERE = (Token("keyword", word) for word in ("AND", "MATCH", "WHERE"))
_OPEN, _CLOSE = Token("operator", "("), Token("operator", ")")
# Where one of these stands, AND does not simply join conditions.
_NOT_A_CONJUNCTION = frozenset({"OR", "XOR", "CASE", "WHEN", "THEN", "ELSE", "END"})
_VALUES = frozenset({"string", "number", "parameter", "variable"})
_LITERALS = frozenset({"TRUE", "FALSE"})


def common_form(tokens: Sequence[Token]) -> Tokens:
    """Give the form of a legal query whose words ``classify`` has named."""
    result = list(tokens)
    if not _projects_all(result):
        result = without_column_names(result)
        result = _with_conditions_outside(result)
    result = _sort_keys(result)
    if not _projects_all(result):
        result = _without_unused_variables(result)
    result = _sort_conditions(result)
    return number_variables(_turn_paths(result))


def _projects_all(tokens: Tokens) -> bool:
    return any(
        is_operator(token, "*")
        and at(tokens, index - 1).kind == "keyword"
        and at(tokens, index - 1).text in ("RETURN", "WITH", "DISTINCT")
        for index, token in enumerate(tokens)
    )


def _with_conditions_outside(tokens: Tokens) -> Tokens:
    """Move the maps of each MATCH into its WHERE."""
    result, n_new = list(tokens), 0
    for start in reversed([i for i, token in enumerate(tokens) if token == _MATCH]):
        end = end_of_clause(result, start + 1)
        pattern = result[start + 1 : end]
        paths = _all_paths(pattern)
        if paths is None:
            continue
        pattern, conditions, n_new = _split_maps(pattern, paths, n_new)
        after = end
        if at(result, end) == _WHERE:
            after = end_of_clause(result, end + 1)
            parts = _conjunction(result[end + 1 : after])
            if parts is None and conditions:
                parts = [[_OPEN, *result[end + 1 : after], _CLOSE]]
            conditions = conditions + (parts or [result[end + 1 : after]])
        result[start + 1 : after] = [*pattern, *_where(conditions)]
    return result


def _where(conditions: list[Tokens]) -> Tokens:
    if not conditions:
        return []
    joined = [_WHERE]
    for index, condition in enumerate(conditions):
        joined += [_AND, *condition] if index else condition
    return joined


def _all_paths(tokens: Tokens) -> list[Path] | None:
    """Read ``name = path, path, …``; nothing where there is anything else."""
    closes, paths, index = closing_brackets(tokens), [], 0
    while index < len(tokens):
        if tokens[index].kind in VARIABLES and is_operator(at(tokens, index + 1), "="):
            index += 2
        path = read_path(tokens, index, closes)
        if path is None or (path.end < len(tokens) and tokens[path.end] != COMMA):
            return None
        paths.append(path)
        index = path.end + 1
    return paths


def _split_maps(tokens: Tokens, paths: list[Path], n_new: int) -> tuple[Tokens, list[Tokens], int]:
    """Take the maps out of a pattern that holds nothing but paths, and give them as conditions."""
    pattern: Tokens = []
    conditions: list[Tokens] = []
    position = 0
    entities = [e for path in paths for e in (*path.nodes, *path.relationships)]
    for entity in sorted(entities, key=lambda entity: entity.start):
        pairs = None if entity.has_length else _pairs(tokens, entity.keys)
        if pairs is None or entity.keys is None:
            continue
        pattern += tokens[position : entity.body[0]]
        position = entity.body[0]
        name = entity.variable
        if name is None:
            name, n_new = f"\0{n_new}", n_new + 1  # no query can name a variable so
            pattern.append(Token("variable", name))
        pattern += tokens[position : entity.keys[0]]
        position = entity.keys[1]
        head = [Token("variable", name), Token("operator", ".")]
        conditions += [[*head, key, Token("operator", "="), *value] for key, value in pairs]
    return pattern + tokens[position:], conditions, n_new


def _pairs(tokens: Tokens, keys: tuple[int, int] | None) -> list[tuple[Token, Tokens]] | None:
    """Read ``{key: value, …}``; nothing where a value is more than one word."""
    if keys is None:
        return None
    pairs = []
    for item in split(tokens[keys[0] + 1 : keys[1] - 1], COMMA):
        if len(item) != 3 or item[0].kind != "name" or not is_operator(item[1], ":"):
            return None
        is_literal = item[2].kind == "keyword" and item[2].text in _LITERALS
        if item[2].kind not in _VALUES and not is_literal:
            return None
        pairs.append((item[0], item[2:]))
    return pairs


def _conjunction(tokens: Sequence[Token]) -> list[Tokens] | None:
    """Split at AND; nothing where the words are no plain conjunction."""
    level = 0
    for token in tokens:
        level += is_operator(token, "(", "[", "{") - is_operator(token, ")", "]", "}")
        if level == 0 and token.kind == "keyword" and token.text in _NOT_A_CONJUNCTION:
            return None
    return split(tokens, _AND)


def _masked(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """Give what sorting looks at: everything but the names of variables."""
    return [(t.kind, "") if t.kind in VARIABLES else (t.kind, t.text) for t in tokens]


def _sort_conditions(tokens: Tokens) -> Tokens:
    result = list(tokens)
    for start in reversed([i for i, token in enumerate(tokens) if token == _WHERE]):
        end = end_of_clause(result, start + 1)
        parts = _conjunction(result[start + 1 : end])
        # After the bar of a list another expression begins; the bar of labels looks the same.
        has_bar = len(split(result[start + 1 : end], Token("operator", "|"))) > 1
        if parts is not None and not has_bar:
            result[start:end] = _where(sorted(parts, key=_masked))
    return result


def _sort_keys(tokens: Tokens) -> Tokens:
    result = list(tokens)
    for path in find_paths(tokens):
        for entity in (*path.nodes, *path.relationships):
            if entity.keys is not None:
                first, last = entity.keys[0] + 1, entity.keys[1] - 1
                parts = sorted(split(tokens[first:last], COMMA), key=_masked)
                joined = [word for part in parts for word in (COMMA, *part)]
                result[first:last] = joined[1:]
    return result


def _without_unused_variables(tokens: Tokens) -> Tokens:
    counts = Counter(token.text for token in tokens if token.kind in VARIABLES)
    # In a condition a variable that nothing else names would be a mistake, so it is kept.
    matched = {
        index
        for start in (i for i, token in enumerate(tokens) if token == _MATCH)
        for index in range(start + 1, end_of_clause(tokens, start + 1))
    }
    unused = {
        entity.body[0]
        for path in find_paths(tokens)
        for entity in (*path.nodes, *path.relationships)
        if entity.variable is not None and counts[entity.variable] == 1
    }
    return [token for index, token in enumerate(tokens) if index not in unused & matched]


def _turn_paths(tokens: Tokens) -> Tokens:
    result = list(tokens)
    for path in find_paths(tokens):
        # A named path, a shortest path, a part that is repeated, and the list of a path's
        # relationships have a direction of their own.
        before, after = at(tokens, path.start - 1), at(tokens, path.end)
        is_whole = before.kind == "keyword" or is_operator(before, *",[{")
        is_whole &= after.kind in ("keyword", "") or is_operator(after, *",]}|")
        is_list = any(r.has_length and r.variable is not None for r in path.relationships)
        if is_whole and not is_list:
            ways = (tokens[path.start : path.end], _turned(tokens, path))
            result[path.start : path.end] = sorted(ways, key=_masked)[0]
    return result


def _turned(tokens: Tokens, path: Path) -> Tokens:
    """Write a path from its end to its start."""
    minus, left, right = (Token("operator", text) for text in "-<>")
    result = list(tokens[path.nodes[-1].start : path.nodes[-1].end])
    pairs = zip(path.nodes[:-1], path.relationships, strict=True)
    for node, relationship in reversed(list(pairs)):
        body = tokens[relationship.body[0] : relationship.body[1]]
        if is_operator(at(tokens, relationship.body[0] - 1), "["):
            body = [Token("operator", "["), *body, Token("operator", "]")]
        words = tokens[relationship.start : relationship.end]
        is_left, is_right = words[0] == left, words[-1] == right
        result += [left] * is_right + [minus, *body, minus] + [right] * is_left
        result += tokens[node.start : node.end]
    return result
