"""Check fields of a source's records as its manifest specifies."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from expertflow.core.errors import ConfigError
from expertflow.core.strict_json import parse_json
from expertflow.data.checks import cypher, language, sql, typescript
from expertflow.data.records import Fields
from expertflow.data.reject import Filtered, clip_message, excerpt
from expertflow.data.settings import CheckName, FieldCheck
from expertflow.data.shapes import MISSING, look_up, reject_missing_field, with_value

# Longer documents are not validated against a schema.
MAX_JSON_CHARS = 1_000_000


class CheckKind(NamedTuple):
    """A kind of check and the settings it reads besides the field; others are rejected.

    ``run`` takes a value, its record and the check. It returns a replacement or None, and raises
    ``Filtered``, without a field for a fault of the value itself. ``find_problem`` describes a
    wrong setting.
    """

    run: Callable[[Any, Fields, FieldCheck], Any]
    keys: tuple[str, ...] = ()
    find_problem: Callable[[FieldCheck], str | None] = lambda _: None
    of_text: bool = True


def build_checks(checks: tuple[FieldCheck, ...], *, source: str) -> Callable[[Fields], Fields]:
    """Build a function that returns its record, perhaps rewritten, or raises ``Filtered``.

    The first failing check decides. A null field is not checked; an absent one is a ``Reject``, so
    that misspelled names are noticed. Building imports no parser; ConfigError for a wrong setting.
    """
    built = [(check, _find_kind(check, source)) for check in checks]

    def run_checks(record: Fields) -> Fields:
        for check, kind in built:
            field = check.field
            value = look_up(record, field)
            if value is MISSING:
                raise reject_missing_field(record, field)
            if value is None:
                continue
            if kind.of_text and not isinstance(value, str):
                what = type(value).__name__
                raise Filtered("not_text", f"expected text, found {what}", field=field, value=value)
            try:
                rewritten = kind.run(value, record, check)
            except Filtered as fault:
                if fault.field is None:
                    fault.field = field
                    fault.value = excerpt(value) if isinstance(value, str) else None
                raise
            # Copy only on a change: the next check reads the new value.
            if rewritten is not None and rewritten != value:
                record = with_value(record, field, rewritten)
        return record

    return run_checks


def _find_kind(check: FieldCheck, source: str) -> CheckKind:
    kind = KINDS[check.check]
    others = (key for known in KINDS.values() for key in known.keys if key not in kind.keys)
    # If ignored, it would look as if it had an effect.
    foreign = next((key for key in others if getattr(check, key) not in (None, ())), None)
    own = ", ".join(kind.keys) or "no key besides field"
    problem = kind.find_problem(check)
    if foreign is not None:
        problem = f"{foreign} belongs to another check; remove it (this one reads {own})"
    if problem is not None:
        raise ConfigError(f"source {source}, check {check.check} of {check.field!r}: {problem}")
    return kind


def _find_length_problem(check: FieldCheck) -> str | None:
    low, high = check.min_chars, check.max_chars
    is_set = low is not None or high is not None
    if is_set and (low is None or high is None or low <= high):
        return None
    return f"min_chars is {low} and max_chars {high}; set one, or both and the first no higher"


def _check_length(text: str, _: Fields, check: FieldCheck) -> None:
    n, low, high = len(text), check.min_chars, check.max_chars
    if low is not None and n < low:
        raise Filtered("too_short", f"{n} characters, minimum {low}")
    if high is not None and n > high:
        raise Filtered("too_long", f"{n} characters, maximum {high}")


def _check_json(value: Any, record: Fields, check: FieldCheck) -> None:
    """Check that a value is strict JSON, valid under the schema in another field if one is named.

    The schema's draft is its ``$schema``, else 2020-12. ``format`` is not asserted. Nothing is
    fetched: external references to all but the drafts' own schemas fail.
    """
    place, schema = check.schema_field, None
    if place is not None:
        schema = look_up(record, place)
        if schema is MISSING:
            raise reject_missing_field(record, place)
        if schema is None:
            raise Filtered("schema_missing", "the record has no schema", field=place)
    try:
        # A column may hold values that JSON lacks, such as dates, decimals or bytes.
        text = value if isinstance(value, str) else json.dumps(value)
        parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise Filtered("json_unparsable", clip_message(error)) from error
    if place is None:
        return
    if len(text) > MAX_JSON_CHARS:
        detail = f"longer than {MAX_JSON_CHARS:,} characters, too long to validate"
        raise Filtered("schema_too_costly", detail)
    # Imported here, since building checks must not import a parser.
    from expertflow.data.checks.json_schema import find_fault

    if (fault := find_fault(text, schema)) is not None:
        if fault[0] == "json_schema_violation":
            raise Filtered(*fault)
        raise Filtered(*fault, field=place, value=schema if isinstance(schema, str) else None)


def _find_schema_problem(check: FieldCheck) -> str | None:
    if check.schema_field and check.schema_field != check.field:
        return None
    fault = "is the field itself" if check.schema_field else "is unset"
    return f"schema_field {fault}; set it to the field that contains the schema"


KINDS: dict[CheckName, CheckKind] = {
    "sql": CheckKind(sql.check_sql, ("dialect", "transpile_to"), sql.find_problem),
    "json": CheckKind(_check_json, of_text=False),
    "json_schema": CheckKind(_check_json, ("schema_field",), _find_schema_problem, of_text=False),
    "cypher": CheckKind(cypher.check_cypher),
    "typescript": CheckKind(typescript.check_typescript),
    "length": CheckKind(_check_length, ("min_chars", "max_chars"), _find_length_problem),
    "language": CheckKind(language.check_language, ("languages",), language.find_problem),
}
