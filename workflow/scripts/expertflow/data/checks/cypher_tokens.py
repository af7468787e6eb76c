"""Rewrite the tokens of Neo4j Cypher that graphglot lacks into ones that it parses.

Each rule preserves validity, up to types: a number replaces what was removed.
"""

from collections.abc import Callable

from graphglot.lexer.token import Token, TokenType

_OPENING = (TokenType.LEFT_PAREN, TokenType.LEFT_BRACKET, TokenType.LEFT_BRACE)
_CLOSING = (TokenType.RIGHT_PAREN, TokenType.RIGHT_BRACKET, TokenType.RIGHT_BRACE)


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
        if token.token_type == TokenType.RIGHT_BRACE and opened:
            _close(result, opened.pop(), parse_subquery)
    return result


def _close(tokens: list[Token], start: int, parse_subquery: Callable[[list[Token]], None]) -> None:
    if not start:
        return
    word = tokens[start - 1]
    if word.token_type in (TokenType.COUNT, TokenType.COLLECT_LIST):
        # The contents may be those of EXISTS { … }, which graphglot parses; a number is valid
        # wherever this is.
        parse_subquery(tokens[start:])
        tokens[start - 1 :] = [_like(word, TokenType.NUMBER, "1")]
    elif word.token_type == TokenType.VAR:
        items = _items(tokens[start + 1 : -1])
        if any(item and item[0].token_type == TokenType.PERIOD for item in items):
            tokens[start - 1 :] = _as_map(tokens[start], items, tokens[-1])


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


def _as_map(start: Token, items: list[list[Token]], end: Token) -> list[Token]:
    result = [start]
    for index, item in enumerate(items):
        name = item[1] if len(item) == 2 and item[0].token_type == TokenType.PERIOD else None
        if name is None and len(item) == 1 and item[0].token_type == TokenType.VAR:
            name = item[0]
        if index:
            result.append(_like(start, TokenType.COMMA, ","))
        if name is None:
            result += item
        else:
            key = "all" if name.text == "*" else name.text
            result += [_like(name, TokenType.VAR, key), _like(name, TokenType.COLON, ":")]
            result.append(_like(name, TokenType.NUMBER, "1"))
    return [*result, end]


def _like(token: Token, kind: TokenType, text: str) -> Token:
    return Token(kind, text, token.line, token.col, token.start, token.end)
