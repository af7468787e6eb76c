"""Check that a field is JSON, strictly read."""

from typing import Any

from expertflow.core.strict_json import MAX_DEPTH, depth, parse_json
from expertflow.data.checks.faults import Check, clip, require_text
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck


def build(check: FieldCheck, _: str) -> Check:
    """Build the check. A value that is an object or a list is JSON read before: it passes."""

    def run(value: Any, _: dict[str, Any]) -> Any:
        read_json(check, value)
        return value

    return run


def read_json(check: FieldCheck, value: Any) -> Any:
    """Give the JSON value of a field: text is parsed, any other value was read before."""
    if isinstance(value, dict | list):
        if (n := depth(value)) > MAX_DEPTH:
            raise _unparsable(f"nested {n:,} levels deep, at most {MAX_DEPTH}", check, value)
        return value
    if isinstance(value, bool | int | float):
        return value
    try:
        return parse_json(require_text(check, value))
    except ValueError as error:
        raise _unparsable(clip(error), check, value) from error


def _unparsable(detail: str, check: FieldCheck, value: Any) -> Filtered:
    shown = value if isinstance(value, str) else None
    return Filtered("json_unparsable", detail, field=check.field, value=shown)
