"""Check that a field is strict JSON valid under the schema in another field."""

from functools import cache
from typing import Any

from expertflow.core.strict_json import MAX_DEPTH, depth, parse_json
from expertflow.data.checks.faults import Check, clip, settings_error
from expertflow.data.reject import Filtered, Reject
from expertflow.data.settings import FieldCheck
from expertflow.data.shapes import MISSING, look_up

# Longer documents are refused.
MAX_CHARS = 1_000_000


def build_json(check: FieldCheck, _: str) -> Check:
    def run(value: Any, _: dict[str, Any]) -> Any:
        _read_json(check, value)
        return value

    return run


def _read_json(check: FieldCheck, value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_json(value)
        except ValueError as error:
            raise Filtered("json_unparsable", clip(error)) from error
    if isinstance(value, dict | list) and (n := depth(value)) > MAX_DEPTH:
        raise Filtered("json_unparsable", f"nested {n:,} levels deep, at most {MAX_DEPTH}")
    if not isinstance(value, dict | list | bool | int | float):
        kind = type(value).__name__
        raise Filtered("not_text", f"it holds a {kind}", field=check.field, value=value)
    return value


def build(check: FieldCheck, source: str) -> Check:
    """Build the check of a schema, whose draft is its ``$schema``, else 2020-12.

    ``format`` is not asserted. Nothing is fetched: external references to all but the drafts' own
    schemas fail.
    """
    schema_field = check.schema_field
    if not schema_field or schema_field == check.field:
        fault = "is the field itself" if schema_field else "is unset"
        raise settings_error(
            source, check, "schema_field", f"{fault}; name the field that holds the schema"
        )

    def run(value: Any, record: dict[str, Any]) -> Any:
        schema = look_up(record, schema_field)
        if schema is MISSING:
            raise Reject("missing_field", "a check needs the schema in it", field=schema_field)
        if schema is None:
            raise Filtered("schema_missing", "the record has no schema", field=schema_field)
        instance = _read_json(check, value)
        if isinstance(value, str) and len(value) > MAX_CHARS:
            detail = f"longer than {MAX_CHARS:,} characters, too long to judge"
            raise Filtered("schema_too_costly", detail)
        if (fault := _validators().fault(instance, schema)) is not None:
            if fault[0] == "json_schema_violation":
                raise Filtered(*fault)
            shown = schema if isinstance(schema, str) else None
            raise Filtered(*fault, field=schema_field, value=shown)
        return value

    return run


@cache
def _validators() -> Any:
    from expertflow.data.checks.json_schema import SchemaValidators

    return SchemaValidators()
