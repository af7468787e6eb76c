"""JSON against its schema and its reference; hostile JSON is only ever wrong."""

import json
import re
import socket
import urllib.request
from typing import Any

import pytest

from expertflow.core.errors import EvaluationError
from expertflow.core.strict_json import MAX_DEPTH
from expertflow.evaluate.tasks.json_schema import JsonSchema, equal_json

judge_json = JsonSchema.judge_texts

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "multipleOf": 0.5}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
REFERENCE = '{"name": "Ada", "age": 36}'


def _kind(prediction: str, *, reference: str = REFERENCE, schema: str = SCHEMA) -> str:
    verdict = judge_json(prediction, reference=reference, schema=schema)
    assert verdict.correct == (verdict.kind == "correct")
    return verdict.kind


def test_kinds() -> None:
    expected = {
        '{"age": 36.0,\n "name": "Ada"}': "correct",
        'Sure!\n```json\n{"name": "Ada", "age": 36}\n```': "correct",
        '{"name": "Ada", "age": 37}': "valid_but_different",
        '{"name": "Ada"}': "valid_but_different",
        '{"name": "\\ud800", "age": 36}': "valid_but_different",
        '{"name": "\ud800", "age": 36}': "valid_but_different",
        '{"name": "Ada", "age": ' + "9" * 300 + "}": "valid_but_different",
        '{"name": 1, "age": 36}': "invalid",
        '{"name": "Ada", "age": 36, "x": 1}': "invalid",
        "[]": "invalid",
        "{'name': 'Ada'}": "did_not_parse",
        '{"name": "Ada"} and more': "did_not_parse",
        "NaN": "did_not_parse",
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1): "did_not_parse",
        "[" + "1," * 500_000 + "1]": "did_not_parse",
    }
    assert {prediction: _kind(prediction) for prediction in expected} == expected
    recursive = '{"type": "array", "items": {"$ref": "#"}}'
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert _kind(deepest, reference="[]", schema=recursive) == "valid_but_different"


def test_a_fault_is_a_short_encodable_text() -> None:
    schema = '{"additionalProperties": {"type": "null"}}'
    for key in (r"\ud800", "k" * 1000):
        verdict = judge_json(f'{{"{key}": 1}}', reference="{}", schema=schema)
        assert verdict.kind == "invalid" and len(verdict.detail.encode()) < 500


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("no JSON", "line 1, column 1"),
        ("[]", "an object, true or false"),
        ('{"type": "nothing"}', "is not valid"),
        ('{"$ref": "#/$defs/missing"}', "missing"),
        ('{"$ref": "#"}', "refers to itself endlessly"),
        ('{"type": "object", "patternProperties": {"(": {}}}', "missing )"),
        ('{"x": {"type": "nothing"}, "$ref": "#/x"}', "there is no type 'nothing'"),
        ('{"x": {"properties": 3}, "$ref": "#/x"}', "schema is unusable"),
        ('{"$schema": ["a list"]}', "schema is unusable"),
        ('{"type": "array"}', "rejects the reference: $: "),
    ],
)
def test_a_schema_that_cannot_judge_its_reference_is_an_error(schema: str, why: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(why)):
        judge_json(REFERENCE, reference=REFERENCE, schema=schema)
    with pytest.raises(EvaluationError, match="reference is not JSON"):
        judge_json("{}", reference="{", schema="true")


DRAFT = "http://json-schema.org/draft-{}/schema#"
STARTS = {r"^\p{Lu}": {"type": "integer"}, r"^\p{Ll}": {"maxLength": 9}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$schema": DRAFT.format("04"), "maximum": 5, "exclusiveMaximum": True}, 4, 5),
        ({"$schema": DRAFT.format("07"), "items": [{}], "additionalItems": False}, [1], [1, 2]),
        ({"$ref": DRAFT.format("07")}, {"type": "null"}, {"type": 3}),
        ({"properties": {"w": {"pattern": r"^\p{L}+$"}}}, {"w": "Ä"}, {"w": "1"}),
        ({"patternProperties": STARTS, "additionalProperties": False}, {"w": "Ä"}, {"_w": "Ä"}),
    ],
)
def test_drafts_and_classes_of_unicode(schema: Any, good: Any, bad: Any) -> None:
    written, reference = json.dumps(schema), json.dumps(good)
    assert _kind(reference, reference=reference, schema=written) == "correct"
    assert _kind(json.dumps(bad), reference=reference, schema=written) == "invalid"


def test_no_schema_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        opened.append(arguments)
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    remote = '{"$ref": "https://example.org/person.json"}'
    with pytest.raises(EvaluationError, match="schema is unusable"):
        _kind(REFERENCE, schema=remote)
    # Only the prediction reaches the `$ref` to a remote schema.
    branch = '{"if": {"type": "array"}, "then": {"$ref": "file:///etc/hostname"}}'
    assert _kind("[]", schema=branch) == "schema_error"
    assert _kind(REFERENCE, schema=branch) == "correct"
    assert opened == []


def test_equality_follows_json() -> None:
    for left, right in ((1, 1.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})):
        assert equal_json(left, right)
    for left, right in ((True, 1), ([0], [False]), ([1, 2], [2, 1]), (None, False), ({}, [])):
        assert not equal_json(left, right)
