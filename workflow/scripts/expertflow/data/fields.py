"""Reach into a record by a field's name or dotted path, as templates and checks do."""

from collections.abc import Mapping
from typing import Any

MISSING = object()


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """Give the value under a field's name or dotted path; ``MISSING`` where there is none."""
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def replaced(record: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Copy a record with another value under a path that ``look_up`` finds."""
    if path in record:
        return {**record, path: value}
    result: dict[str, Any] = _with(record, path.split("."), value)
    return result


def _with(box: Any, parts: list[str], value: Any) -> Any:
    if not parts:
        return value
    first, *rest = parts
    if isinstance(box, list):
        place = int(first)
        return [*box[:place], _with(box[place], rest, value), *box[place + 1 :]]
    return {**box, first: _with(box[first], rest, value)}
