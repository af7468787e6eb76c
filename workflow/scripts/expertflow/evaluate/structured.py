"""Judge JSON: does it parse, does it keep to its schema, is it the reference's value."""

import json
import math
import re
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Verdict
from expertflow.evaluate.text import strip_code_fence

MAX_CHARS = 200_000
# Deeper values would exhaust Python's stack in the validator, sooner or later by who calls it.
MAX_DEPTH = 64
# The largest power of ten that is also a float: beyond it, comparing with a float overflows.
MAX_INTEGER_DIGITS = 308


def judge_json(prediction: str, *, reference: str, schema: str) -> Verdict:
    """Judge a prediction as correct if it is valid under the schema and equals the reference.

    Kinds: ``correct``, ``did_not_parse``, ``invalid``, ``valid_but_different``, and
    ``schema_error`` when the document's schema can judge nothing: it is no JSON Schema, refers to
    something outside itself (nothing is ever fetched), or refuses its own reference. Schemas are
    read as Draft 2020-12; ``format`` is not asserted.

    Raises:
        EvaluationError: the reference is not JSON.
    """
    try:
        wanted = parse_json(reference)
    except ValueError as error:
        raise EvaluationError(f"the reference is not JSON: {error}") from error
    try:
        validator = _validator(schema)
        if (error_in_reference := _first_error(validator, wanted)) is not None:
            return _wrong("schema_error", f"it refuses the reference: {error_in_reference}")
    except (ValueError, SchemaError, Unresolvable, re.error) as error:
        return _wrong("schema_error", _one_line(error))
    except RecursionError:
        return _wrong("schema_error", "it refers to itself without end")
    return _judge(prediction, wanted=wanted, validator=validator)


def _judge(prediction: str, *, wanted: Any, validator: Draft202012Validator) -> Verdict:
    try:
        found = parse_json(prediction)
    except ValueError as error:
        return _wrong("did_not_parse", _one_line(error))
    try:
        broken = _first_error(validator, found)
    except RecursionError:
        return _wrong("did_not_parse", "nested too deeply to validate")
    except Unresolvable as error:
        # Only a branch that the reference does not take leads here.
        return _wrong("schema_error", _one_line(error))
    if broken is not None:
        return _wrong("invalid", broken)
    if not equal_json(found, wanted):
        return _wrong("valid_but_different")
    return Verdict(correct=True, kind="correct")


def parse_json(text: str) -> Any:
    """Parse strictly: NaN, Infinity, a key given twice and values beyond the limits are errors.

    Raises:
        ValueError: says what is wrong; every kind of hostile text ends here, none in a crash.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS:,} characters")
    try:
        value = json.loads(
            strip_code_fence(text).strip(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    if depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def depth(value: Any) -> int:
    """Count the levels of nesting without recursion: a scalar has 0, ``[[]]`` has 2."""
    level, items = 0, [value]
    while containers := [item for item in items if isinstance(item, dict | list)]:
        level += 1
        items = [inner for c in containers for inner in (c.values() if isinstance(c, dict) else c)]
    return level


def equal_json(left: Any, right: Any) -> bool:
    """Compare as JSON does: key order is free, 1 equals 1.0, and true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal_json(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal_json, left, right))
    return bool(left == right)


def _validator(schema: str) -> Draft202012Validator:
    value = parse_json(schema)
    Draft202012Validator.check_schema(value)
    # The registry is given so that the validator's own one, which downloads, is not used.
    return Draft202012Validator(value, registry=Registry())


def _first_error(validator: Draft202012Validator, value: Any) -> str | None:
    error: ValidationError | None = next(iter(validator.iter_errors(value)), None)
    return None if error is None else f"{error.json_path}: {_one_line(error.message)}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number beyond the range of floats")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of more than {MAX_INTEGER_DIGITS} digits")
    return int(text)


def _wrong(kind: str, detail: str = "") -> Verdict:
    return Verdict(correct=False, kind=kind, detail=detail)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:200]
