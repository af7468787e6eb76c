"""Find out what a chat template wants to know about a text, by letting it read a watched one.

A template that is applied to watched texts notes every question it asks: is "</think>" in it, does
it begin with a blank. For another text that gives the same answers it writes the same layout around
that text, so documents that share a layout need a few questions each instead of the template. One
that does more than ask, that cuts or counts or rewrites, is opaque and applied to every document.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

from jinja2 import Environment, nodes

# What reads a text without one of its methods being called, so that no note is made of it.
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
    """A question about text ``text`` and its answer for the texts that share a layout."""

    text: int
    question: str
    argument: str | None
    answer: bool

    def holds(self, text: str) -> bool:
        """Tell whether a text gives the same answer."""
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


class Watch:
    """Notes what is asked of some texts."""

    def __init__(self) -> None:
        self.conditions: dict[Condition, None] = {}
        self.opaque = False

    def ask(self, text: "Watched", question: str, argument: Any) -> bool:
        """Answer a question about a text and note it."""
        if argument is not None and type(argument) is not str:
            self.opaque = True
            argument = str.__str__(argument) if isinstance(argument, str) else ""
        answer = QUESTIONS[question](text.plain, argument)
        self.conditions[Condition(text.number, question, argument, answer)] = None
        return answer


def is_watchable(environment: Environment, template: str) -> bool:
    """Tell whether every way in which a template may read a text is seen."""
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
    """Tell whether ``in`` asks a text, or looks a value up in a list that is written out.

    What is looked for in a plain string is read without a note.
    """
    lookups = [operand for operand in node.ops if operand.op in ("in", "notin")]
    written_out = (nodes.List, nodes.Tuple, nodes.Dict)
    return isinstance(node.expr, nodes.Const) or all(
        isinstance(operand.expr, written_out) for operand in lookups
    )


def _is_seen_call(node: nodes.Call) -> bool:
    """Tell whether a call of a string's method is given constants only.

    A plain string that is asked about a text reads it without a note.
    """
    if not isinstance(node.node, nodes.Getattr) or not hasattr(str, node.node.attr):
        return True
    given = [*node.args, *(pair.value for pair in node.kwargs)]
    whole = node.dyn_args is None and node.dyn_kwargs is None
    return (
        whole
        and not node.node.attr.startswith("format")
        and all(isinstance(value, nodes.Const) for value in given)
    )


class Derived(str):
    """A watched text with something added: it may be added to and written, nothing else."""

    watch: Watch

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return derived(str.__add__(self, other), self.watch)

    def __radd__(self, other: str) -> str:
        return derived(str.__add__(other, self), self.watch)


class Watched(Derived):
    """A text of which is noted what is asked. It stands for texts that are not empty."""

    number: int

    @property
    def plain(self) -> str:
        """Give the text itself."""
        return str.__str__(self)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, part: object) -> bool:
        return self.watch.ask(self, "contains", part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.watch.ask(self, "equals", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, prefix: Any, *rest: SupportsIndex | None) -> bool:
        """Note the question."""
        self.watch.opaque |= bool(rest)
        return self.watch.ask(self, "startswith", prefix)

    def endswith(self, suffix: Any, *rest: SupportsIndex | None) -> bool:
        """Note the question."""
        self.watch.opaque |= bool(rest)
        return self.watch.ask(self, "endswith", suffix)

    def strip(self, chars: str | None = None) -> str:
        """Note that there is nothing to strip; where there is, the layout is another."""
        return self._as_it_is("strip", chars)

    def lstrip(self, chars: str | None = None) -> str:
        """Note that there is nothing to strip at the start."""
        return self._as_it_is("lstrip", chars)

    def rstrip(self, chars: str | None = None) -> str:
        """Note that there is nothing to strip at the end."""
        return self._as_it_is("rstrip", chars)

    def replace(self, old: str, new: str, *rest: Any, **named: Any) -> str:
        """Note that there is nothing to replace."""
        self.watch.opaque |= self.watch.ask(self, "contains", old)
        return self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Note that there is nothing to split at."""
        self.watch.opaque |= sep is None or self.watch.ask(self, "contains", sep)
        return [self]

    def _as_it_is(self, question: str, chars: str | None) -> str:
        self.watch.opaque |= not self.watch.ask(self, question, chars)
        return self


def note_reading(value: Any) -> None:
    """Note that a value is read as a whole, with the texts in it."""
    if isinstance(value, Derived):
        value.watch.opaque = True
    elif isinstance(value, dict):
        note_reading([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            note_reading(item)


def watched(text: str, number: int, watch: Watch) -> Watched:
    """Watch a text that is not empty."""
    made = Watched(text)
    made.number, made.watch = number, watch
    return made


def derived(text: str, watch: Watch) -> Derived:
    """Hold a text that a watched one is part of."""
    made = Derived(text)
    made.watch = watch
    return made


def _opaque(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Derived, *arguments: Any, **named: Any) -> Any:
        self.watch.opaque = True
        return plain(self, *arguments, **named)

    method.__name__ = name
    return method


# What is neither asking nor adding. Making, deleting and looking an object up is no reading.
_HARMLESS = {
    "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__",
    "__dict__", "__setattr__", "__delattr__", "__getattribute__", "__dir__", "__reduce__",
    "__reduce_ex__", "__getnewargs__", "__sizeof__", "__getstate__", "maketrans",
}  # fmt: skip
for _name in set(dir(str)) - _HARMLESS - set(vars(Derived)):
    setattr(Derived, _name, _opaque(_name))
