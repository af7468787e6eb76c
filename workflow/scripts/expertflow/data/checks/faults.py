"""Shared by all checks: settings errors and limits on parser input."""

from collections.abc import Callable
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.data.reject import excerpt
from expertflow.data.settings import FieldCheck

# Takes a field's value and its record; returns the value or its replacement. Raises ``Filtered``
# without a field for a fault of the value itself.
Check = Callable[[Any, dict[str, Any]], Any]

# Parsers need about 20 Python frames per bracket. This stays clear of Python's recursion limit of
# 1000, whose reach depends on the caller.
MAX_NESTING = 32


def settings_error(source: str, check: FieldCheck, key: str, problem: str) -> ConfigError:
    return ConfigError(f"source {source}, check {check.check} of {check.field!r}: {key} {problem}")


def clip(message: object) -> str:
    """Shorten a parser's message to one line; it may quote the value at length."""
    return excerpt(" ".join(str(message).split())) or ""


def too_hard(text: str, *, max_chars: int) -> str | None:
    """Return why a text is not parsed; brackets in strings count too."""
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
