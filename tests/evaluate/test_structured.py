"""JSON against its schema and its reference; hostile JSON is only ever wrong."""

import json
import socket
import urllib.request
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow.core.errors import EvaluationError
from expertflow.core.strict_json import MAX_DEPTH
from expertflow.evaluate.structured import equal_json, judge_json, parse_answer

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "multipleOf": 0.5}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
REFERENCE = '{"name": "Ada", "age": 36}'

scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


def _kind(prediction: str, *, reference: str = REFERENCE, schema: str = SCHEMA) -> str:
    verdict = judge_json(prediction, reference=reference, schema=schema)
    assert verdict.correct == (verdict.kind == "correct")
    return verdict.kind


@pytest.mark.parametrize(
    ("prediction", "kind"),
    [
        ('{"age": 36.0,\n "name": "Ada"}', "correct"),
        ('Sure!\n```json\n{"name": "Ada", "age": 36}\n```', "correct"),
        ('{"name": "Ada", "age": 37}', "valid_but_different"),
        ('{"name": "Ada"}', "valid_but_different"),
        ('{"name": 1, "age": 36}', "invalid"),
        ('{"name": "Ada", "age": 36, "x": 1}', "invalid"),
        ("[]", "invalid"),
        ("", "did_not_parse"),
        ("{'name': 'Ada'}", "did_not_parse"),
        ('{"name": "Ada"} and more', "did_not_parse"),
    ],
)
def test_kinds(prediction: str, kind: str) -> None:
    assert _kind(prediction) == kind


@pytest.mark.parametrize(
    "prediction",
    [
        "NaN",
        "[-Infinity]",
        "1e999",
        '{"name": "Ada", "name": "Ada", "age": 36}',
        "9" * 5_000,
        "-" + "9" * 400,
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" + "1," * 500_000 + "1]",
        "\0",
        '"\x01"',
    ],
)
def test_hostile_json_does_not_parse(prediction: str) -> None:
    assert _kind(prediction) == "did_not_parse"


def test_hostile_json_that_parses_is_judged() -> None:
    assert _kind('{"name": "\\ud800", "age": 36}') == "valid_but_different"
    assert _kind('{"name": "\ud800", "age": 36}') == "valid_but_different"
    assert _kind('{"name": "Ada", "age": ' + "9" * 300 + "}") == "valid_but_different"
    recursive = '{"type": "array", "items": {"$ref": "#"}}'
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert _kind(deepest, reference="[]", schema=recursive) == "valid_but_different"


@pytest.mark.parametrize(
    "schema",
    [
        "no JSON",
        '{"type": "nothing"}',
        '{"$ref": "#/$defs/missing"}',
        '{"$ref": "#"}',
        '{"type": "object", "patternProperties": {"(": {}}}',
        '{"type": "array"}',
    ],
)
def test_a_schema_that_can_judge_nothing_is_said_to(schema: str) -> None:
    assert _kind(REFERENCE, schema=schema) == "schema_error"


def test_no_schema_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        opened.append(arguments)
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    remote = '{"$ref": "https://example.org/person.json"}'
    assert _kind(REFERENCE, schema=remote) == "schema_error"
    # Here the reference is judged without the reference to a remote schema, the prediction is not.
    branch = '{"if": {"type": "array"}, "then": {"$ref": "file:///etc/hostname"}}'
    assert _kind("[]", schema=branch) == "schema_error"
    assert _kind(REFERENCE, schema=branch) == "correct"
    assert opened == []


def test_a_reference_that_is_no_json_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="reference is not JSON"):
        judge_json("{}", reference="{", schema="true")


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (True, 1, False),
        ([0], [False], False),
        (1, 1.0, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        (None, False, False),
        ({}, [], False),
    ],
)
def test_equality_is_that_of_json(left: Any, right: Any, equal: bool) -> None:
    assert equal_json(left, right) == equal


@settings(deadline=None, max_examples=60)
@given(values, values)
def test_any_value_equals_itself_through_text(left: Any, right: Any) -> None:
    assert equal_json(parse_answer(json.dumps(left)), left)
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    assert equal_json(left, right) or not same
    assert _kind(json.dumps(left), reference=json.dumps(left), schema="true") == "correct"


@settings(deadline=None, max_examples=60)
@given(st.text())
def test_any_text_gets_a_verdict(text: str) -> None:
    assert _kind(text) in {"did_not_parse", "invalid", "valid_but_different", "correct"}
