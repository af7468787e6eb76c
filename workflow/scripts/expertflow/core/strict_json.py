"""Parse untrusted JSON; ambiguous or crash-inducing input is an error."""

import json
import sys
from collections.abc import Iterator
from typing import Any

# Deeper values would exhaust Python's stack in some reader.
MAX_DEPTH = 64
# Integers beyond it cannot be converted to floats.
MAX_NUMBER = sys.float_info.max


def parse_json(text: str) -> Any:
    """Parse strictly; ValueError for NaN, Infinity, a repeated key and values beyond the limits."""
    try:
        value = json.loads(text, object_pairs_hook=refuse_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    if count_levels(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    for item in iter_values(value):
        # Written so that NaN is also refused.
        if isinstance(item, int | float) and not -MAX_NUMBER <= item <= MAX_NUMBER:
            raise ValueError("a number is not finite, or beyond the range of floats")
    return value


def count_levels(value: Any) -> int:
    """Count the levels of nesting without recursion: a scalar has 0, ``[[]]`` has 2."""
    level, items = 0, [value]
    while containers := [item for item in items if isinstance(item, dict | list)]:
        level += 1
        items = [inner for c in containers for inner in (c.values() if isinstance(c, dict) else c)]
    return level


def iter_values(value: Any) -> Iterator[Any]:
    """Yield a value and everything in its lists and objects, in order, without recursion.

    >>> list(iter_values([{"a": 1}, 2]))
    [[{'a': 1}, 2], {'a': 1}, 1, 2]
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, dict):
            waiting += reversed(item.values())
        elif isinstance(item, list | tuple):
            waiting += reversed(item)


def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    """Return the pairs of a JSON object; ValueError if a key is repeated."""
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result
