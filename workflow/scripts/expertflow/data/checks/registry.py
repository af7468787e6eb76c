"""Build the checks that a source's records must pass, from the manifest's list."""

from collections.abc import Callable
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.data.checks import cypher, natural, schema, sql, structured, typescript
from expertflow.data.checks.faults import Check, settings_error
from expertflow.data.reject import Reject
from expertflow.data.settings import CheckName, FieldCheck
from expertflow.data.shapes import MISSING, look_up, replaced

_Builder = Callable[[FieldCheck, str], Check]
_BUILDERS: dict[CheckName, _Builder] = {
    "sql": sql.build,
    "json": structured.build,
    "json_schema": schema.build,
    "cypher": cypher.build,
    "typescript": typescript.build,
    "length": natural.build_length,
    "language": natural.build_language,
}
# The keys that each check reads besides its field; the others must be left out.
_KEYS: dict[CheckName, tuple[str, ...]] = {
    "sql": ("dialect", "transpile_to"),
    "json": (),
    "json_schema": ("schema_field",),
    "cypher": (),
    "typescript": (),
    "length": ("min_chars", "max_chars"),
    "language": ("languages",),
}
_ALL_KEYS = tuple(dict.fromkeys(key for keys in _KEYS.values() for key in keys))


def build_checks(
    checks: tuple[FieldCheck, ...], *, source: str
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Build a function that returns the record it is given, or raises ``Filtered``.

    Checks run in the order given and the first that fails decides. Where one rewrites a field, the
    record is copied; the one passed in is never changed. A field is named as in a template. One
    that is null is not checked: whether it may be is the template's business. One that is absent is
    a ``Reject``: no other name of a field would ever be noticed. Building reads no data and imports
    no parser, so it can be done while the workflow is read.

    Raises:
        ConfigError: a setting that a check cannot use; names source, check and field.
    """
    built = tuple((check.field, _build(check, source)) for check in checks)

    def run_checks(record: dict[str, Any]) -> dict[str, Any]:
        for field, run in built:
            value = look_up(record, field)
            if value is MISSING:
                raise Reject("missing_field", "a check needs this field", field=field)
            if value is None:
                continue
            checked = run(value, record)
            if checked is not value and checked != value:
                record = replaced(record, field, checked)
        return record

    return run_checks


def _build(check: FieldCheck, source: str) -> Check:
    builder = _BUILDERS.get(check.check)
    if builder is None:
        raise ConfigError(
            f"source {source}, field {check.field!r}: check {check.check!r} is unknown; "
            f"use one of {', '.join(_BUILDERS)}"
        )
    for key in _ALL_KEYS:
        if key not in _KEYS[check.check] and getattr(check, key) not in (None, ()):
            others = ", ".join(_KEYS[check.check]) or "no key besides field"
            raise settings_error(
                source, check, key, f"is of another check; remove it (this one reads {others})"
            )
    return builder(check, source)
