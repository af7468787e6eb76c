"""What all checks share: refusing settings, and what no parser is given."""

from collections.abc import Callable
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.data.reject import excerpt
from expertflow.data.settings import FieldCheck

# Takes a field's value and its record; returns the value, or one to replace it. It raises
# ``Filtered`` without a field for a fault of the value itself.
Check = Callable[[Any, dict[str, Any]], Any]

# The parsers descend once a bracket and need about 20 Python frames each time. The limit keeps them
# clear of Python's own limit of 1000, whose reach would depend on who calls.
MAX_NESTING = 32


def settings_error(source: str, check: FieldCheck, key: str, problem: str) -> ConfigError:
    return ConfigError(f"source {source}, check {check.check} of {check.field!r}: {key} {problem}")


def clip(message: object) -> str:
    """Shorten a parser's message to one line, since it may quote the value at length."""
    return excerpt(" ".join(str(message).split())) or ""


def too_hard(text: str, *, max_chars: int) -> str | None:
    """Return why no parser gets a text; brackets in strings count, whatever the parser is."""
    if len(text) > max_chars:
        return f"longer than {max_chars:,} characters, too long to judge"
    deepest = level = 0
    for char in text:
        if char in "([{":
            level += 1
            deepest = max(deepest, level)
        elif char in ")]}":
            level = max(0, level - 1)
    if deepest > MAX_NESTING:
        return f"nested {deepest:,} brackets deep, at most {MAX_NESTING} are judged"
    return None
