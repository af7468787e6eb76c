"""Judge JSON: does it parse, does it keep to its schema, is it the reference's value."""

import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from expertflow.core.errors import EvaluationError
from expertflow.core.strict_json import parse_json
from expertflow.evaluate.records import Verdict
from expertflow.evaluate.text import strip_code_fence

MAX_CHARS = 200_000


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
        wanted = parse_answer(reference)
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
        found = parse_answer(prediction)
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


def parse_answer(text: str) -> Any:
    """Parse a model's answer strictly, without the fence that it may stand in.

    Raises:
        ValueError: it is longer than any answer, or not JSON.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS:,} characters")
    return parse_json(strip_code_fence(text).strip())


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
    value = parse_answer(schema)
    Draft202012Validator.check_schema(value)
    # The registry is given so that the validator's own one, which downloads, is not used.
    return Draft202012Validator(value, registry=Registry())


def _first_error(validator: Draft202012Validator, value: Any) -> str | None:
    error: ValidationError | None = next(iter(validator.iter_errors(value)), None)
    return None if error is None else f"{error.json_path}: {_one_line(error.message)}"


def _wrong(kind: str, detail: str = "") -> Verdict:
    return Verdict(correct=False, kind=kind, detail=detail)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:200]
