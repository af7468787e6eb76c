"""Rewrite the tokens of Neo4j Cypher that graphglot lacks into ones that it parses.

Each rule preserves validity, up to types: a number replaces what was removed.
"""

from collections.abc import Callable

from graphglot.lexer.token import Token, TokenType

_OPENING = (TokenType.LEFT_PAREN, TokenType.LEFT_BRACKET, TokenType.LEFT_BRACE)
_CLOSING = (TokenType.RIGHT_PAREN, TokenType.RIGHT_BRACKET, TokenType.RIGHT_BRACE)
_SUBQUERIES = (TokenType.COUNT, TokenType.COLLECT_LIST)


def adapt_tokens(tokens: list[Token], parse_subquery: Callable[[list[Token]], None]) -> list[Token]:
    """Replace names, map projections, ``COUNT { … }`` and ``COLLECT { … }``, innermost first.

    ``parse_subquery`` gets the braces of each subquery and raises if they do not parse.
    """
    result: list[Token] = []
    opened: list[int] = []
    followers = [*(token.token_type for token in tokens[1:]), None]
    for token, after in zip(tokens, followers, strict=True):
        if token.token_type == TokenType.SIZE and after != TokenType.LEFT_PAREN:
            # A plain name unless it calls a function: ``n.size AS size``.
            token = _like(token, TokenType.VAR, token.text)
        if token.token_type == TokenType.LEFT_BRACE:
            opened.append(len(result))
        result.append(token)
        if token.token_type == TokenType.RIGHT_BRACE and opened and (start := opened.pop()):
            word, braces = result[start - 1], result[start:]
            if word.token_type in _SUBQUERIES:
                parse_subquery(braces)
                # A number is valid wherever a subquery is.
                result[start - 1 :] = [_like(word, TokenType.NUMBER, "1")]
            elif word.token_type == TokenType.VAR:
                result[start - 1 :] = _without_projection(word, braces)
    return result


def _without_projection(word: Token, braces: list[Token]) -> list[Token]:
    """Turn ``n {.a, .*, b}`` into ``{a: 1, all: 1, b: 1}``."""
    items = _items(braces[1:-1])
    if not any(item and item[0].token_type == TokenType.PERIOD for item in items):
        return [word, *braces]
    result = []
    for item in items:
        is_dotted = len(item) == 2 and item[0].token_type == TokenType.PERIOD
        if is_dotted or [token.token_type for token in item] == [TokenType.VAR]:
            name = "all" if item[-1].text == "*" else item[-1].text
            pair = ((TokenType.VAR, name), (TokenType.COLON, ":"), (TokenType.NUMBER, "1"))
            item = [_like(item[-1], kind, text) for kind, text in pair]
        result += [_like(braces[0], TokenType.COMMA, ","), *item]
    return [braces[0], *result[1:], braces[-1]]


def _items(tokens: list[Token]) -> list[list[Token]]:
    items: list[list[Token]] = [[]]
    level = 0
    for token in tokens:
        level += (token.token_type in _OPENING) - (token.token_type in _CLOSING)
        if token.token_type == TokenType.COMMA and level == 0:
            items.append([])
        else:
            items[-1].append(token)
    return items


def _like(token: Token, kind: TokenType, text: str) -> Token:
    return Token(kind, text, token.line, token.col, token.start, token.end)
