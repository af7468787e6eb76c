"""Judge TypeScript by its syntax tree. Nothing is ever executed or type-checked."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertflow.core.errors import EvaluationError
from expertflow.data.checks.typescript import load_parsers
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.scoring import IsolatedTask

if TYPE_CHECKING:
    from tree_sitter import Node

# Error recovery has no time limit; this keeps the worst case at about a second.
MAX_CHARS = 200_000

# Nodes whose members may be separated by `;`, `,`, both or a new line.
_SEPARATED = {"object_type", "interface_body", "class_body"}
_STATEMENT_LISTS = {"program", "statement_block", "switch_case", "switch_default"}
_CLOSING = {")", "]", "}", ">"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)

Token = tuple[str, str]


class TypeScript(IsolatedTask):
    metric = "syntax_tree_match"
    fields = frozenset({"prefix"})
    packages = ("tree-sitter", "tree-sitter-typescript")

    @staticmethod
    def judge_texts(answer: str, reference: str, prefix: str | None = None) -> Judgment:
        """Compare the syntax trees of an answer and its reference.

        Whitespace, comments, the kind of quotes, trailing commas and optional semicolons do not
        count. The shape of the tree does, because ``return x`` and ``return`` with ``x`` on the
        next line differ. ``prefix`` is code that both complete, so that a fragment can be parsed.
        It comes from a record field, never from the prompt, which has chat and instructions too.

        Kinds: ``correct``, ``did_not_parse``, ``different``. A different program may still be
        right: this metric is a lower bound. Raises EvaluationError if the reference does not parse.
        """
        prefix = prefix or ""
        wanted = syntax(prefix + strip_code_fence(reference))
        if wanted is None:
            raise EvaluationError(
                "the reference is not TypeScript; if it only completes other code, "
                "set evaluation.fields.prefix to the record field with that code"
            )
        completion = strip_code_fence(answer)
        if not completion.strip():
            return Judgment("did_not_parse", "empty")
        found = syntax(prefix + completion)
        if found is None:
            return Judgment("did_not_parse")
        return Judgment("correct" if found == wanted else "different")


def syntax(code: str) -> list[Token] | None:
    """Return the normalized syntax tree as a flat list; null if the code does not parse.

    A tree opens with ``("(", node type)`` and closes with ``(")", "")``; a leaf is its node type
    and text. Code is parsed as TypeScript, then as TSX.
    """
    if len(code) > MAX_CHARS:
        return None
    # A lone surrogate becomes invalid UTF-8, which the parser reports as an error.
    source = code.encode("utf-8", "surrogatepass")
    for parser in load_parsers():
        root = parser.parse(source).root_node
        if not root.has_error:
            return list(_tokens(root))
    return None


def _tokens(root: "Node") -> Iterator[Token]:
    # An explicit stack: generated code may nest deeper than Python's recursion limit.
    stack: list[Node | None] = [root]
    while stack:
        node = stack.pop()
        if node is None:
            yield ")", ""
        elif node.type == "string":
            # Without the quotes, and without backslashes that only they require.
            text = _text(node)[1:-1]
            yield "string", _ESCAPE.sub(lambda m: m[1] if m[1] in "'\"" else m[0], text)
        elif node.child_count == 0:
            yield node.type, _text(node)
        else:
            yield "(", node.type
            stack.append(None)  # closes this node after its children
            stack.extend(reversed(_significant_children(node)))


def _significant_children(node: "Node") -> "list[Node]":
    dropped = {"comment", "empty_statement" if node.type in _STATEMENT_LISTS else ""}
    children = [c for c in node.children if c.type not in dropped]
    types = ["", *(c.type for c in children), ""]

    def is_optional(before: str, own: str, after: str) -> bool:
        # In `[1,,]` the last comma makes a hole; only one after an element is a trailing comma.
        is_trailer = after in _CLOSING and before not in ("", ",", "[")
        # Even `for (;;)` needs no semicolons here: its parts are separate nodes.
        return own == ";" or (own == "," and (node.type in _SEPARATED or is_trailer))

    around = zip(types, types[1:], types[2:], strict=False)
    return [c for c, near in zip(children, around, strict=True) if not is_optional(*near)]


def _text(node: "Node") -> str:
    return (node.text or b"").decode("utf-8", "replace")
