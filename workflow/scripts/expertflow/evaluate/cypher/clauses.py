"""Cut a query at its clauses and at what separates their parts."""

from collections.abc import Sequence

from expertflow.evaluate.cypher.tokens import Token, at, is_operator

Tokens = list[Token]

COMMA = Token("operator", ",")
# Kinds of the words that name a value of the query's own.
VARIABLES = frozenset({"variable", "yielded"})
_CLAUSES = """
    CALL CREATE DELETE DETACH FOREACH LIMIT MATCH MERGE OPTIONAL ORDER REMOVE RETURN SET SKIP UNION
    UNWIND WHERE WITH
"""
_CLAUSE_WORDS = frozenset(_CLAUSES.split())


def end_of_clause(tokens: Tokens, start: int) -> int:
    """Find where the words of a clause end: at the next one, at WHERE, or at its bracket."""
    level = 0
    for index in range(start, len(tokens)):
        token = tokens[index]
        if is_operator(token, "(", "[", "{"):
            level += 1
        elif is_operator(token, ")", "]", "}"):
            level -= 1
            if level < 0:
                return index
        elif level == 0 and (_opens_clause(tokens, index) or is_operator(token, ";")):
            return index
    return len(tokens)


def _opens_clause(tokens: Tokens, index: int) -> bool:
    word = tokens[index].text
    if tokens[index].kind != "keyword":
        return False
    if word == "WITH":  # STARTS WITH, ENDS WITH
        return at(tokens, index - 1).text not in ("STARTS", "ENDS")
    return word in _CLAUSE_WORDS


def split(tokens: Sequence[Token], separator: Token) -> list[Tokens]:
    """Split where the separator stands in no further bracket."""
    parts: list[Tokens] = [[]]
    level = 0
    for token in tokens:
        level += is_operator(token, "(", "[", "{") - is_operator(token, ")", "]", "}")
        if level == 0 and token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
