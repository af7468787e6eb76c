"""Find out what a chat template asks about a text by passing it a traced one.

A template applied to traced texts records each question: does a text contain "</think>", does it
start with a space. Documents whose texts have the same answers share a layout, without running the
template. A template that cuts, counts or rewrites is opaque and runs on every document.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

from jinja2 import Environment, nodes

# Nodes that read a text without calling its methods, hence unrecorded.
UNSEEN = (
    nodes.Concat, nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock, nodes.Block,
    nodes.ScopedEvalContextModifier, nodes.EvalContextModifier, nodes.Include, nodes.Import,
    nodes.FromImport, nodes.Extends,
)  # fmt: skip
SEEN_FILTERS = {
    "trim", "tojson", "replace", "string", "items", "list", "first", "last", "length", "default",
    "d", "selectattr", "rejectattr", "upper", "lower", "capitalize",
}  # fmt: skip
UNSEEN_TESTS = {"in", "sameas"}
SEEN_SELECTIONS = {"equalto", "eq", "==", "ne", "!=", "defined", "undefined", "none"}


class Condition(NamedTuple):
    """A question about text number ``text``, with its answer for all texts of a layout."""

    text: int
    question: str
    argument: str | None
    answer: bool

    def holds(self, text: str) -> bool:
        return QUESTIONS[self.question](text, self.argument) == self.answer


QUESTIONS: dict[str, Callable[[str, Any], bool]] = {
    "contains": lambda text, part: part in text,
    "startswith": lambda text, start: text.startswith(start),
    "endswith": lambda text, end: text.endswith(end),
    "equals": lambda text, other: text == other,
    "strip": lambda text, chars: text.strip(chars) == text,
    "lstrip": lambda text, chars: text.lstrip(chars) == text,
    "rstrip": lambda text, chars: text.rstrip(chars) == text,
}


class Trace:
    """Questions asked about texts; ``opaque`` if a template did more than ask."""

    def __init__(self) -> None:
        self.conditions: dict[Condition, None] = {}
        self.opaque = False

    def ask(self, text: "TracedStr", question: str, argument: Any) -> bool:
        # The argument is another text: the answer depends on both.
        if argument is not None and type(argument) is not str:
            self.opaque = True
            argument = str.__str__(argument) if isinstance(argument, str) else ""
        answer = QUESTIONS[question](str.__str__(text), argument)
        self.conditions[Condition(text.number, question, argument, answer)] = None
        return answer


def is_traceable(environment: Environment, template: str) -> bool:
    tree = environment.parse(template)
    return (
        next(tree.find_all(UNSEEN), None) is None
        and all(_is_seen_filter(node) for node in tree.find_all(nodes.Filter))
        and all(node.name not in UNSEEN_TESTS for node in tree.find_all(nodes.Test))
        and all(_is_seen_comparison(node) for node in tree.find_all(nodes.Compare))
        and all(_is_seen_call(node) for node in tree.find_all(nodes.Call))
    )


def _is_seen_filter(node: nodes.Filter) -> bool:
    if node.name in ("selectattr", "rejectattr") and len(node.args) > 1:
        return isinstance(node.args[1], nodes.Const) and node.args[1].value in SEEN_SELECTIONS
    constant = all(isinstance(argument, nodes.Const) for argument in node.args)
    return node.name in SEEN_FILTERS and (constant or node.name in ("default", "d"))


def _is_seen_comparison(node: nodes.Compare) -> bool:
    # "x" in message calls the text's method; message in "xyz" reads it untraced.
    lookups = [operand for operand in node.ops if operand.op in ("in", "notin")]
    written_out = (nodes.List, nodes.Tuple, nodes.Dict)
    return isinstance(node.expr, nodes.Const) or all(
        isinstance(operand.expr, written_out) for operand in lookups
    )


def _is_seen_call(node: nodes.Call) -> bool:
    if not isinstance(node.node, nodes.Getattr) or not hasattr(str, node.node.attr):
        return True
    # A plain string's method reads a traced argument untraced.
    given = [*node.args, *(pair.value for pair in node.kwargs)]
    return (
        node.dyn_args is None
        and node.dyn_kwargs is None
        and not node.node.attr.startswith("format")
        and all(isinstance(value, nodes.Const) for value in given)
    )


class DerivedStr(str):
    """A traced text with additions; it may only be concatenated and written."""

    trace: Trace

    def __new__(cls, text: str, trace: Trace) -> "DerivedStr":
        made = super().__new__(cls, text)
        made.trace = trace
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return DerivedStr(str.__add__(self, other), self.trace)

    def __radd__(self, other: str) -> str:
        return DerivedStr(str.__add__(other, self), self.trace)


class TracedStr(DerivedStr):
    """A nonempty text that records how it is read.

    A modifying method asks whether there is anything to change; if so, the layout differs.
    """

    number: int

    def __new__(cls, text: str, trace: Trace, number: int) -> "TracedStr":
        made = str.__new__(cls, text)
        made.trace, made.number = trace, number
        return made

    def __bool__(self) -> bool:
        return True

    def __contains__(self, part: object) -> bool:
        return self.trace.ask(self, "contains", part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.trace.ask(self, "equals", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, prefix: Any, *rest: SupportsIndex | None) -> bool:
        self.trace.opaque |= bool(rest)
        return self.trace.ask(self, "startswith", prefix)

    def endswith(self, suffix: Any, *rest: SupportsIndex | None) -> bool:
        self.trace.opaque |= bool(rest)
        return self.trace.ask(self, "endswith", suffix)

    def replace(self, old: str, new: str, *rest: Any, **named: Any) -> str:
        self.trace.opaque |= self.trace.ask(self, "contains", old)
        return self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        # Without a separator it splits at whitespace, which no question covers.
        self.trace.opaque |= sep is None or self.trace.ask(self, "contains", sep)
        return [self]


def _stripping(name: str) -> Callable[..., str]:
    def method(self: TracedStr, chars: str | None = None) -> str:
        self.trace.opaque |= not self.trace.ask(self, name, chars)
        return self

    return method


for _name in ("strip", "lstrip", "rstrip"):
    setattr(TracedStr, _name, _stripping(_name))


def note_reading(value: Any) -> None:
    if isinstance(value, DerivedStr):
        value.trace.opaque = True
    elif isinstance(value, dict):
        note_reading([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            note_reading(item)


def _opaque(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: DerivedStr, *arguments: Any, **named: Any) -> Any:
        self.trace.opaque = True
        return plain(self, *arguments, **named)

    method.__name__ = name
    return method


# Neither questions nor additions: creating, deleting and looking up objects reads no text.
_HARMLESS = {
    "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__",
    "__dict__", "__setattr__", "__delattr__", "__getattribute__", "__dir__", "__reduce__",
    "__reduce_ex__", "__getnewargs__", "__sizeof__", "__getstate__", "maketrans",
}  # fmt: skip
for _name in set(dir(str)) - _HARMLESS - set(vars(DerivedStr)):
    setattr(DerivedStr, _name, _opaque(_name))
