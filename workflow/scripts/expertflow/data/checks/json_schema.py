"""Validate JSON against a schema in another process, which is killed if it costs too much.

``find_fault`` runs in the caller, ``main`` in that process.
"""

import json
import os
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

from expertflow.core.strict_json import iter_values, parse_json
from expertflow.core.worker import Worker, serve_messages
from expertflow.data.reject import clip_message

# Limits per document and schema: of 3,021 from SchemaStore and the drafts' test suite the costliest
# takes 0.3 s.
CPU_S, MEMORY_BYTES = 1.8, 256 << 20
# A busy machine gives the process little time.
_WALL_S = 120.0
# Total text of the compiled schemas cached: checking one against its draft takes 3 ms.
MAX_CACHED_CHARS = 1_000_000
# References followed per document: minimum, per value, maximum. Of 796 SchemaStore documents 99 %
# need fewer than 100 and the worst 4,360. 30 definitions that each refer twice to the next need
# 2^30, as do nested alternatives, at up to 0.3 ms each.
N_REFERENCES, N_REFERENCES_PER_VALUE, MAX_REFERENCES = 10_000, 10, 100_000
# Limit for patterns that backtrack endlessly. Not covered: patternProperties that jsonschema itself
# evaluates again for `unevaluatedProperties`, without a limit.
REGEX_TIMEOUT_S = 1.0
# What jsonschema raises if a reference leads to a non-schema that the draft's own schema did not
# validate.
_CRASHES = (ArithmeticError, AttributeError, LookupError, TypeError)

Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class TooCostlyError(Exception):
    pass


@cache
def _worker() -> Worker:
    return Worker(__name__, {}, wall_s=_WALL_S, quiet=True)


def find_fault(instance: Any, schema: Any) -> tuple[str, str] | None:
    """Return why a JSON value does not satisfy a schema, as a reason and its detail."""
    # A column may hold dates, decimals or bytes.
    reason = "json_unparsable"
    try:
        document = json.dumps(instance)
        reason = "schema_invalid"
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except TypeError as error:
        return reason, str(error)
    kind, found = _worker().ask({"instance": document, "schema": text})
    if kind == "timed_out":
        limits = f"{CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MB"
        return "schema_too_costly", f"validation takes more than {limits}"
    return (kind, found) if kind else None


def main(_: Any) -> None:
    validators = SchemaValidators()

    def answer(message: dict[str, Any]) -> tuple[str, Any]:
        # Kills the process, even during a call into C.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            fault = validators.fault(json.loads(message["instance"]), message["schema"])
        except MemoryError:
            # The cache may be what fills the memory.
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return fault or ("", "")

    serve_messages(answer, memory_bytes=MEMORY_BYTES, cpu_s=2)


class SchemaValidators:
    def __init__(self) -> None:
        self._n_references, self._most_references = 0, 0
        self._of_text: dict[str, tuple[Any, tuple[str, str] | None]] = {}
        self._bounded = cache(self._bound)

    def fault(self, instance: Any, text: str) -> tuple[str, str] | None:
        allowed = N_REFERENCES + N_REFERENCES_PER_VALUE * sum(1 for _ in iter_values(instance))
        self._n_references, self._most_references = 0, min(allowed, MAX_REFERENCES)
        try:
            validator, fault = self._cached(text)
            if fault is not None:
                return fault
            error = next(validator.iter_errors(instance), None)
        except TooCostlyError as given_up:
            return "schema_too_costly", str(given_up)
        except Unresolvable as unresolvable:
            return "schema_unresolvable", f"never fetched: {clip_message(unresolvable)}"
        except RecursionError:
            return "schema_unresolvable", "it refers to itself endlessly, or nests too deeply"
        except regex.error as wrong:
            return "schema_invalid", f"a pattern: {clip_message(wrong)}"
        except UnknownType as wrong:
            return "schema_invalid", f"there is no type {clip_message(wrong.type)!r}"
        except ValueError as wrong:  # urllib's, for a malformed URL
            return "schema_unresolvable", f"a reference: {clip_message(wrong)}"
        except _CRASHES as wrong:
            return "schema_invalid", f"a part of it is not a schema: {clip_message(wrong)}"
        if error is None:
            return None
        broken = "allows nothing" if error.validator is None else f"violates {error.validator!r}"
        return "json_schema_violation", f"{clip_message(error.json_path)} {broken}"

    def _cached(self, text: str) -> tuple[Any, tuple[str, str] | None]:
        if text not in self._of_text:
            compiled = self._compile(text)
            # Drop all: most sources have few schemas, or a new one for each document.
            if len(text) + sum(map(len, self._of_text)) > MAX_CACHED_CHARS:
                self._of_text.clear()
            self._of_text[text] = compiled
        return self._of_text[text]

    def _compile(self, text: str) -> tuple[Any, tuple[str, str] | None]:
        try:
            schema = parse_json(text)
        except ValueError as error:
            return None, ("schema_invalid", clip_message(error))
        if not isinstance(schema, dict | bool):
            return None, ("schema_invalid", "a schema is an object, true or false")
        draft: Any = Draft202012Validator
        if isinstance(schema, dict) and "$schema" in schema:
            named, validator_for = schema["$schema"], cast(Any, validators.validator_for)
            draft = validator_for(schema, default=None) if isinstance(named, str) else None
        if draft is None:
            return None, ("schema_unresolvable", "$schema is not a draft from 3 to 2020-12")
        try:
            # No formats: how many are checked depends on which packages are installed.
            draft.check_schema(schema, format_checker=FormatChecker(()))
        except SchemaError as error:
            return None, ("schema_invalid", clip_message(f"{error.json_path}: {error.message}"))
        except RecursionError:
            return None, ("schema_invalid", "nested too deeply")
        # The registry contains the drafts' own schemas; without one, jsonschema downloads.
        return self._bounded(draft)(schema, registry=REGISTRY), None

    def _bound(self, draft: Any) -> Any:
        bounded = pattern_keywords(_matches) | {"uniqueItems": _unique_items}
        known = {name: keyword for name, keyword in bounded.items() if name in draft.VALIDATORS}
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if name in draft.VALIDATORS:
                known[name] = self._counted(draft.VALIDATORS[name])
        extend: Any = validators.extend
        return extend(draft, known)

    def _counted(self, follow: Keyword) -> Keyword:
        def keyword(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
            self._n_references += 1
            if self._n_references > self._most_references:
                raise TooCostlyError(f"more than {self._most_references:,} references to follow")
            return follow(validator, value, instance, schema)

        return keyword


def pattern_keywords(matches: Callable[[str, str], bool]) -> dict[str, Keyword]:
    """Return the pattern keywords, matched in document order; jsonschema's vary by run."""

    def pattern(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not matches(wanted, instance):
            yield ValidationError(f"{instance!r:.60} does not match {wanted!r}")

    def properties(validator: Any, schemas: Any, instance: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(instance, "object"):
            for wanted, schema in schemas.items():
                for key, value in instance.items():
                    if matches(wanted, key):
                        yield from validator.descend(value, schema, path=key, schema_path=wanted)

    def additional(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key, value in instance.items():
            if key in named or any(matches(pattern, key) for pattern in patterns):
                continue
            if validator.is_type(wanted, "object"):
                yield from validator.descend(value, wanted, path=key)
            elif not wanted:
                yield ValidationError(f"{key!r:.60} is unexpected", path=(key,))

    return {
        "pattern": pattern,
        "patternProperties": properties,
        "additionalProperties": additional,
    }


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


def _matches(pattern: str, text: str) -> bool:
    try:
        return _compiled(pattern).search(text, timeout=REGEX_TIMEOUT_S) is not None
    except TimeoutError as error:
        raise TooCostlyError(f"a pattern takes longer than {REGEX_TIMEOUT_S:g} s") from error


# Escapes, classes and comments, where `(?R)` is literal; elsewhere it recurses.
_LITERALS = re.compile(r"\\.|\(\?#[^)]*\)|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_RECURSION = re.compile(r"\(\?(?:R|[+-]?\d+|&\w+|P>\w+)\)")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> Any:
    # JSON Schema patterns have no recursion; `regex` bounds neither its time nor its memory.
    if _RECURSION.search(_LITERALS.sub("", pattern)):
        raise regex.error("it refers to itself, which JSON Schema does not allow")
    # V0 is `re` syntax plus \p{…}, which JSON Schema patterns may use.
    return regex.compile(pattern, regex.V0)
