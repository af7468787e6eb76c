import json
from pathlib import Path
from typing import Any

import pytest
from hostile_schemas import hostile_schemas

from expertflow.core.files import read_json_lines
from expertflow.data.checks.registry import build_checks
from expertflow.data.reject import Filtered, Reject
from expertflow.data.settings import FieldCheck

RUN = build_checks((FieldCheck(field="a", check="json_schema", schema_field="s"),), source="s")


def reason(document: Any, schema: Any) -> str | None:
    record = {"a": document, "s": schema}
    try:
        assert RUN(record) is record
    except Filtered as fault:
        return fault.reason
    return None


def test_a_violation_names_the_path_and_not_the_value() -> None:
    schema = {"properties": {"n": {"items": {"type": "integer"}}}}
    with pytest.raises(Filtered) as caught:
        RUN({"a": {"n": [1, "secret" * 100]}, "s": schema})
    assert (caught.value.reason, caught.value.field) == ("json_schema_violation", "a")
    assert caught.value.detail == "$.n[1] breaks 'type'"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (None, "schema_missing"),
        ("{", "schema_invalid"),
        ("[]", "schema_invalid"),
        ({"type": "nothing"}, "schema_invalid"),
        ({"pattern": "("}, "schema_invalid"),
        ({"$ref": "#/$defs/absent"}, "schema_unresolvable"),
        ({"$ref": "#"}, "schema_unresolvable"),
        ({"$schema": "https://example.com/mine"}, "schema_unresolvable"),
        ({"$schema": 3}, "schema_unresolvable"),
        ({"$ref": "http://[x"}, "schema_unresolvable"),
        ({"unjudged": {"allOf": 3}, "$ref": "#/unjudged"}, "schema_invalid"),
        (False, "json_schema_violation"),
        (True, None),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, None),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "json_schema_violation"),
    ],
)
def test_schemas(schema: Any, expected: str | None) -> None:
    assert reason('"text"', schema) == expected
    assert reason("{", schema) == ("schema_missing" if schema is None else "json_unparsable")


def test_a_schema_may_lie_inside_an_object_and_is_needed() -> None:
    check = FieldCheck(field="a", check="json_schema", schema_field="task.schema")
    run = build_checks((check,), source="s")
    run({"a": "1", "task": {"schema": {"type": "integer"}}})
    with pytest.raises(Filtered, match="json_schema_violation"):
        run({"a": "1", "task": {"schema": {"type": "string"}}})
    with pytest.raises(Reject, match="missing_field") as caught:
        run({"a": "1"})
    assert caught.value.field == "task.schema"


def test_the_draft_is_the_schemas() -> None:
    # `dependentRequired` came with 2019-09; draft 7 does not know it.
    schema = {"dependentRequired": {"a": ["b"]}}
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert reason({"a": 1}, schema) == "json_schema_violation"
    assert reason({"a": 1}, draft_7) is None


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert reason({}, {"$ref": "http://example.com/x"}) == "schema_unresolvable"


DOUBLING: dict[str, Any] = {
    f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)
} | {"d30": {}}
ARRAYS = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("document", "schema", "expected"),
    [
        # Over two hundred billion ways to cut the text, none of which fits.
        ("a" * 60 + "!", {"pattern": "^(a|aa)+$"}, "schema_too_costly"),
        ("a" * 60, {"pattern": "^(a|aa)+$"}, None),
        # Patterns that refer to themselves, and three that only look so.
        ("a" * 300, {"pattern": "(?R)"}, "schema_invalid"),
        ("a" * 300, {"pattern": "^(a|(?1)(?1))*$"}, "schema_invalid"),
        ("a" * 300, {"pattern": "(?<x>a|aa)(?&x)*b"}, "schema_invalid"),
        ("a" * 300, {"pattern": "(?#[)(?:(?R)|a)*b(?#])"}, "schema_invalid"),
        ("(1)", {"pattern": r"^\(?1\)$"}, None),
        ("(1)", {"pattern": "^[(?1)]+$"}, None),
        ("(R)", {"pattern": r"^[\](?R)]+$"}, None),
        # References that double, and alternatives that nest with the document.
        (1, {"$defs": DOUBLING, "$ref": "#/$defs/d0"}, "schema_too_costly"),
        (None, {"anyOf": [ARRAYS, {**ARRAYS, "minItems": 1}]}, "schema_too_costly"),
    ],
    ids=str,
)
def test_what_blows_up_is_given_up(document: Any, schema: Any, expected: str | None) -> None:
    text = "[" * 60 + "1" + "]" * 60 if document is None else json.dumps(document)
    assert reason(text, schema) == expected


@pytest.mark.parametrize("name", ["alternatives that nest", "a long pattern", "lists of lists"])
def test_what_blows_up_elsewhere_is_ended_and_the_next_is_judged(name: str) -> None:
    schema, document = hostile_schemas()[name]
    assert reason(json.dumps(document), schema) == "schema_too_costly"
    assert reason(1, {"type": "string"}) == "json_schema_violation"


def test_the_budget_is_for_each_document_and_unique_items_cost_little() -> None:
    schema = {"$defs": {"x": {}}, "items": {"$ref": "#/$defs/x"}}
    for _ in range(2):
        assert reason([1] * 20_000, schema) is None
    items: list[Any] = [{"a": i} for i in range(30_000)]
    assert reason(items, {"uniqueItems": True}) is None
    assert reason([*items, {"a": 5}], {"uniqueItems": True}) == "json_schema_violation"


def test_labels_of_schemastore(shared_data: Path) -> None:
    folder = shared_data / "expert-json" / "schemastore"
    rows = read_json_lines(folder / "schemas.jsonl")
    schemas = {row["schema_name"]: row["schema"] for row in rows}
    for row in read_json_lines(folder / "records.jsonl")[::4]:
        expected = None if row["valid"] else "json_schema_violation"
        assert reason(row["document"], schemas[row["schema_name"]]) == expected, row["id"]


def test_labels_of_the_test_suite(shared_data: Path) -> None:
    n_judged = 0
    for row in read_json_lines(shared_data / "expert-json/test-suite/draft2020-12.jsonl"):
        # Optional are formats and details of ECMAScript's patterns.
        if "/optional/" in row["id"]:
            continue
        found = reason(json.dumps(row["data"]), json.dumps(row["schema"]))
        if found == "schema_unresolvable":  # needs the suite's own server
            continue
        n_judged += 1
        assert (found is None) == row["valid"], row["id"]
    assert n_judged > 1200
