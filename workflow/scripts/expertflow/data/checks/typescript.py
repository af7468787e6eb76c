"""Check that a field is TypeScript, by its syntax tree. Nothing is run or type-checked."""

from functools import cache
from typing import TYPE_CHECKING

from expertflow.data.checks.faults import Check, text_check
from expertflow.data.settings import FieldCheck

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

# Error recovery has no time limit of its own; this keeps the worst text to about a second.
MAX_CHARS = 200_000


def build(check: FieldCheck, _: str) -> Check:
    return text_check(check, "typescript_unparsable", _fault)


def _fault(text: str) -> str | None:
    if not text.strip():
        return "no code"
    if len(text) > MAX_CHARS:
        return f"longer than {MAX_CHARS:,} characters, too long to judge"
    # The parser takes the bytes of a lone surrogate as they are: wrong in a name, right in text.
    source = text.encode("utf-8", "surrogatepass")
    root = _parser().parse(source).root_node
    if not root.has_error:
        return None
    node = _first_error(root)
    row, column_bytes = node.start_point
    line = source.split(b"\n")[row]
    n_before = len(line[:column_bytes].decode("utf-8", "replace"))
    what = f"{node.type!r} is missing" if node.is_missing else "not TypeScript from here"
    return f"line {row + 1}, column {n_before + 1}: {what}"


@cache
def _parser() -> "Parser":
    import tree_sitter_typescript
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_typescript.language_typescript()))


def _first_error(root: "Node") -> "Node":
    # A loop, not recursion: code may nest deeper than Python's stack.
    node = root
    while not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error or child.is_missing)
    return node
