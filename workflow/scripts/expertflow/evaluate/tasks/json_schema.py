"""Judge JSON: whether it parses, is valid under its schema, and equals the reference."""

from typing import Any

from jsonschema import Draft202012Validator

from expertflow.core.errors import EvaluationError
from expertflow.core.strict_json import parse_json
from expertflow.data.checks.json_schema import BREAKDOWNS, compile_schema, explain_breakdown
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.isolation.rows import one_line
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.scoring import IsolatedTask

MAX_CHARS = 200_000


class JsonSchema(IsolatedTask):
    metric = "valid_and_equal"
    fields = frozenset({"schema"})
    required = ("fields.schema",)
    packages = ("jsonschema", "regex")

    @staticmethod
    def judge_texts(answer: str, reference: str, schema: str) -> Judgment:
        r"""Judge an answer as correct if it is valid under the schema and equals the reference.

        Kinds: ``correct``, ``did_not_parse``, ``invalid``, ``valid_but_different``, and
        ``schema_error`` if the answer reaches a broken part of the schema that the reference does
        not. The draft is that of ``$schema``, else 2020-12. Nothing is fetched; ``format`` is not
        asserted; patterns may use classes such as ``\p{L}``. Raises EvaluationError if the
        reference is not JSON, or its schema is broken or rejects it.
        """
        try:
            wanted = parse_answer(reference)
        except ValueError as error:
            raise EvaluationError(f"the reference is not JSON: {error}") from error
        try:
            validator = compile_schema(parse_answer(schema), Draft202012Validator)
            broken = _first_error(validator, wanted)
        except BREAKDOWNS as error:
            why = explain_breakdown(error)
            raise EvaluationError(f"the schema is unusable: {why}") from error
        if broken is not None:
            raise EvaluationError(f"the schema rejects the reference: {broken}")
        try:
            found = parse_answer(answer)
        except ValueError as error:
            return Judgment("did_not_parse", one_line(error))
        try:
            broken = _first_error(validator, found)
        except RecursionError:
            return Judgment("did_not_parse", "nested too deeply to validate")
        except BREAKDOWNS as error:
            # Only a branch that the reference does not take gets here.
            return Judgment("schema_error", explain_breakdown(error))
        if broken is not None:
            return Judgment("invalid", broken)
        return Judgment("correct" if equal_json(found, wanted) else "valid_but_different")


def parse_answer(text: str) -> Any:
    """Parse an answer strictly, without its fence; raise ValueError if it is not JSON."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS:,} characters")
    return parse_json(strip_code_fence(text).strip())


def equal_json(left: Any, right: Any) -> bool:
    """Compare as JSON does: key order is free, 1 equals 1.0, and true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right  # True == 1 in Python
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal_json(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal_json, left, right))
    return bool(left == right)


def _first_error(validator: Any, value: Any) -> str | None:
    error = next(iter(validator.iter_errors(value)), None)
    return None if error is None else f"{one_line(error.json_path)}: {one_line(error.message)}"
