"""Validate JSON against a schema, within the limits of another process.

``find_fault`` runs in the caller, ``main`` in that process, which is killed if a document and its
schema cost too much: references that double, patterns that backtrack endlessly.
"""

import json
import re
import signal
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, cast

import regex
from jsonschema import Draft202012Validator, FormatChecker, validators
from jsonschema.exceptions import SchemaError, UnknownType, ValidationError
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable

from expertflow.core.strict_json import parse_json
from expertflow.core.worker import Worker, serve_messages
from expertflow.data.reject import clip_message

# Limits per document and schema: of 3,021 from SchemaStore and the drafts' test suite the costliest
# takes 0.3 s.
CPU_S, MEMORY_BYTES = 1.8, 256 << 20
# A busy machine gives the process little time.
_WALL_S = 120.0
# Total text of the compiled schemas cached: checking one against its draft takes 3 ms.
MAX_CACHED_CHARS = 1_000_000
# Raised by broken schemas, also if a `$ref` leads to a part that the draft's own schema did not
# check. jsonschema uses `re` where patterns meet unevaluated names.
BREAKDOWNS = (
    *(SchemaError, Unresolvable, UnknownType, regex.error, re.error, ArithmeticError),
    *(AttributeError, LookupError, TypeError, ValueError, RecursionError),
)

Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


@cache
def _worker() -> Worker:
    return Worker(__name__, {}, wall_s=_WALL_S, quiet=True)


def find_fault(document: str, schema: Any) -> tuple[str, str] | None:
    """Return why a JSON text does not satisfy a schema, as a reason and its detail."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except TypeError as error:
        return "schema_invalid", str(error)
    kind, found = _worker().ask({"instance": document, "schema": text})
    if kind == "timed_out":
        limits = f"{CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MB"
        return "schema_too_costly", f"validation takes more than {limits}"
    return (kind, found) if kind else None


def main(_: Any) -> None:
    compiled: dict[str, Any] = {}

    def judge(instance: Any, text: str) -> tuple[str, str]:
        try:
            if text not in compiled:
                validator = compile_schema(parse_json(text))
                # Drop all: most sources have few schemas, or a new one for each document.
                if len(text) + sum(map(len, compiled)) > MAX_CACHED_CHARS:
                    compiled.clear()
                compiled[text] = validator
            error = next(compiled[text].iter_errors(instance), None)
        except (Unresolvable, RecursionError) as wrong:
            return "schema_unresolvable", explain_breakdown(wrong)
        except BREAKDOWNS as wrong:
            return "schema_invalid", explain_breakdown(wrong)
        if error is None:
            return "", ""
        broken = "allows nothing" if error.validator is None else f"violates {error.validator!r}"
        return "json_schema_violation", f"{clip_message(error.json_path)} {broken}"

    def answer(message: dict[str, Any]) -> tuple[str, Any]:
        # Kills the process, even during a call into C. So does running out of memory, which the
        # cache may be filling.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        found = judge(json.loads(message["instance"]), message["schema"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        return found

    serve_messages(answer, memory_bytes=MEMORY_BYTES, cpu_s=2)


def compile_schema(schema: Any, unknown_draft: Any = None) -> Any:
    """Return a validator that fetches nothing, of the draft that ``$schema`` names, else 2020-12.

    ``unknown_draft`` is used if it names no draft. Raises one of ``BREAKDOWNS``.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object, true or false")
    draft: Any = Draft202012Validator
    if isinstance(schema, dict) and "$schema" in schema:
        named, validator_for = schema["$schema"], cast(Any, validators.validator_for)
        known = validator_for(schema, default=None) if isinstance(named, str) else None
        if (draft := known or unknown_draft) is None:
            raise Unresolvable("$schema is not a draft from 3 to 2020-12")
    # No formats: how many are checked depends on which packages are installed.
    draft.check_schema(schema, format_checker=FormatChecker(()))
    # The registry contains the drafts' own schemas; without one, jsonschema downloads.
    return _with_keywords(draft)(schema, registry=REGISTRY)


def explain_breakdown(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it refers to itself endlessly, or nests too deeply"
    if isinstance(error, UnknownType):
        return f"there is no type {error.type!r:.60}"
    if isinstance(error, SchemaError):
        return clip_message(f"{error.json_path}: {error.message}")
    if isinstance(error, Unresolvable):
        return f"never fetched: {clip_message(error)}"
    return clip_message(error) or type(error).__name__


@cache
def _with_keywords(draft: Any) -> Any:
    extend: Any = validators.extend
    return extend(draft, {name: KEYWORDS[name] for name in KEYWORDS if name in draft.VALIDATORS})


# Keywords matched in document order, where jsonschema's vary by run, and by patterns that are close
# to what JSON Schema specifies: V0 is `re` syntax plus \p{…}.
@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern, regex.V0)


def _pattern(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _compiled(wanted).search(instance):
        yield ValidationError(f"{instance!r:.60} does not match {wanted!r}")


def _pattern_properties(validator: Any, schemas: Any, instance: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for wanted, schema in schemas.items():
            for key, value in instance.items():
                if _compiled(wanted).search(key):
                    yield from validator.descend(value, schema, path=key, schema_path=wanted)


def _additional(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, value in instance.items():
        if key in named or any(_compiled(pattern).search(key) for pattern in patterns):
            continue
        if validator.is_type(wanted, "object"):
            yield from validator.descend(value, wanted, path=key)
        elif not wanted:
            yield ValidationError(f"{key!r:.60} is unexpected", path=(key,))


def _unique_items(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
    """Find repeated items by canonical text; jsonschema compares all pairs."""
    if wanted and validator.is_type(instance, "array"):
        # 1 and 1.0 are equal in JSON Schema, true and 1 are not, and their texts differ.
        texts = {json.dumps(_whole_numbers(item), sort_keys=True) for item in instance}
        if len(texts) < len(instance):
            yield ValidationError("repeats an item")


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value


KEYWORDS: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "uniqueItems": _unique_items,
}
