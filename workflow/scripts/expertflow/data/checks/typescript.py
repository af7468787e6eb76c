"""Check that a field is TypeScript by its syntax tree; nothing is run or type-checked."""

from functools import cache
from typing import TYPE_CHECKING

from expertflow.data.records import Fields
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck

if TYPE_CHECKING:
    from tree_sitter import Parser

# Error recovery has no time limit; this keeps the worst text to about a second.
MAX_CHARS = 200_000


def check_typescript(text: str, _: Fields, __: FieldCheck) -> None:
    if not text.strip():
        raise Filtered("typescript_unparsable", "no code")
    if len(text) > MAX_CHARS:
        detail = f"longer than {MAX_CHARS:,} characters, too long to parse"
        raise Filtered("typescript_unparsable", detail)
    # The parser gets a lone surrogate's raw bytes: wrong in a name, valid in a string.
    source = text.encode("utf-8", "surrogatepass")
    node, with_jsx = (parser.parse(source).root_node for parser in load_parsers())
    # ``<T>value`` is a cast in one and an element in the other: code is valid if either parses it.
    if not (node.has_error and with_jsx.has_error):
        return
    # A loop: code may nest deeper than Python's stack.
    while not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error or child.is_missing)
    row, column_bytes = node.start_point
    line = source.split(b"\n")[row]
    n_before = len(line[:column_bytes].decode("utf-8", "replace"))
    what = f"{node.type!r} is missing" if node.is_missing else "not TypeScript from here"
    raise Filtered("typescript_unparsable", f"line {row + 1}, column {n_before + 1}: {what}")


@cache
def load_parsers() -> "tuple[Parser, Parser]":
    """Return the parsers for TypeScript and for TSX, which has JSX but no ``<T>value`` casts."""
    import tree_sitter_typescript
    from tree_sitter import Language, Parser

    typescript = Language(tree_sitter_typescript.language_typescript())
    return Parser(typescript), Parser(Language(tree_sitter_typescript.language_tsx()))
