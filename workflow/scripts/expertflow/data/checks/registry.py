"""Build the checks for a source's records from its manifest."""

from collections.abc import Callable
from typing import Any, NamedTuple

from expertflow.core.errors import ConfigError
from expertflow.data.checks import cypher, natural, schema, sql, typescript
from expertflow.data.checks.faults import Check, settings_error
from expertflow.data.reject import Filtered, Reject, excerpt
from expertflow.data.settings import CheckName, FieldCheck
from expertflow.data.shapes import MISSING, look_up, replaced


class _Kind(NamedTuple):
    """A check's builder and the keys it reads besides the field; others are refused."""

    build: Callable[[FieldCheck, str], Check]
    keys: tuple[str, ...] = ()
    of_text: bool = True


_KINDS: dict[CheckName, _Kind] = {
    "sql": _Kind(sql.build, ("dialect", "transpile_to")),
    "json": _Kind(schema.build_json, of_text=False),
    "json_schema": _Kind(schema.build, ("schema_field",), of_text=False),
    "cypher": _Kind(cypher.build),
    "typescript": _Kind(typescript.build),
    "length": _Kind(natural.build_length, ("min_chars", "max_chars")),
    "language": _Kind(natural.build_language, ("languages",)),
}


def build_checks(
    checks: tuple[FieldCheck, ...], *, source: str
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Build a function that returns its record, perhaps rewritten, or raises ``Filtered``.

    The first failing check decides. A null field is not checked; an absent one is a ``Reject``, so
    that misspelled names are noticed. Building imports no parser; ConfigError for a wrong setting.
    """
    built = tuple((check.field, *_build(check, source)) for check in checks)

    def run_checks(record: dict[str, Any]) -> dict[str, Any]:
        for field, of_text, run in built:
            value = look_up(record, field)
            if value is MISSING:
                raise Reject("missing_field", "a check needs this field", field=field)
            if value is None:
                continue
            if of_text and not isinstance(value, str):
                kind = type(value).__name__
                raise Filtered("not_text", f"it holds a {kind}", field=field, value=value)
            try:
                checked = run(value, record)
            except Filtered as fault:
                if fault.field is None:
                    fault.field = field
                    fault.value = excerpt(value) if isinstance(value, str) else None
                raise
            if checked is not value and checked != value:
                record = replaced(record, field, checked)
        return record

    return run_checks


def _build(check: FieldCheck, source: str) -> tuple[bool, Check]:
    kind = _KINDS.get(check.check)
    if kind is None:
        raise ConfigError(
            f"source {source}, field {check.field!r}: check {check.check!r} is unknown; "
            f"use one of {', '.join(_KINDS)}"
        )
    for key in (key for known in _KINDS.values() for key in known.keys):
        if key not in kind.keys and getattr(check, key) not in (None, ()):
            others = ", ".join(kind.keys) or "no key besides field"
            raise settings_error(
                source, check, key, f"is of another check; remove it (this one reads {others})"
            )
    return kind.of_text, kind.build(check, source)
