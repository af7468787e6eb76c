"""The list of checks as a whole: order, copies, settings."""

from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.core.errors import ConfigError
from expertflow.data.checks.registry import build_checks
from expertflow.data.reject import Filtered, Reject
from expertflow.data.settings import FieldCheck


def test_the_first_failure_in_the_manifests_order_decides() -> None:
    short = FieldCheck(field="q", check="length", min_chars=50)
    sql = FieldCheck(field="q", check="sql")
    for checks, reason in (((short, sql), "too_short"), ((sql, short), "sql_unparsable")):
        with pytest.raises(Filtered) as caught:
            build_checks(checks, source="s")({"q": "SELECT FROM"})
        assert caught.value.reason == reason


ALL = (
    FieldCheck(field="a", check="sql"),
    FieldCheck(field="a", check="json"),
    FieldCheck(field="a", check="json_schema", schema_field="b"),
    FieldCheck(field="a", check="cypher"),
    FieldCheck(field="a", check="typescript"),
    FieldCheck(field="a", check="length", min_chars=1),
    FieldCheck(field="a", check="language", languages=("en",)),
)


@pytest.mark.parametrize("check", ALL, ids=lambda c: c.check)
def test_a_check_is_of_texts_or_json_values(check: FieldCheck) -> None:
    run, is_json = build_checks((check,), source="s"), check.check in ("json", "json_schema")
    # Null is the business of the template.
    assert run({"a": None}) == {"a": None}
    for value in (b"x", 3, 1.5, True):
        record: dict[str, Any] = {"a": value, "b": {}}
        if is_json and value != b"x":
            assert run(record) is record
            continue
        with pytest.raises(Filtered) as filtered:
            run(record)
        assert (filtered.value.reason, filtered.value.field) == ("not_text", "a")
    with pytest.raises(Reject) as caught:
        build_checks((replace(check, field="x.y"),), source="s")({"a": "1", "x": {}})
    assert (caught.value.reason, caught.value.field) == ("missing_field", "x.y")
    assert not isinstance(caught.value, Filtered)


def test_a_field_is_found_and_rewritten_by_its_path() -> None:
    check = FieldCheck(field="x.1.q", check="sql", dialect="mysql", transpile_to="postgres")
    later = replace(check, dialect="postgres", transpile_to=None)  # sees the rewritten field
    record = {"x": [{}, {"q": "SELECT `a`", "r": 1}], "y": 2}
    found = build_checks((check, later), source="s")(record)
    assert found == {"x": [{}, {"q": 'SELECT "a"', "r": 1}], "y": 2}
    assert record["x"] == [{}, {"q": "SELECT `a`", "r": 1}]
    flat = {"x.1.q": "SELECT `a`", "x": record["x"]}
    assert build_checks((check,), source="s")(flat) == {**flat, "x.1.q": 'SELECT "a"'}


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (FieldCheck(field="a", check="sql", dialect="sqlit"), "dialect 'sqlit'.*sqlite"),
        (FieldCheck(field="a", check="sql", transpile_to="x"), "transpile_to 'x'"),
        (FieldCheck(field="a", check="json_schema"), "schema_field is unset"),
        (FieldCheck(field="a", check="json_schema", schema_field="a"), "the field itself"),
        (FieldCheck(field="a", check="length"), "set one"),
        (FieldCheck(field="a", check="length", min_chars=3, max_chars=2), "3 is above.* 2"),
        (FieldCheck(field="a", check="language"), "languages is empty"),
        (FieldCheck(field="a", check="language", languages=("english",)), "'english'"),
        (FieldCheck(field="a", check="json", dialect="sqlite"), "dialect is of another check"),
    ],
)
def test_bad_settings_are_refused_when_built(check: FieldCheck, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_checks((check,), source="books")
    text = str(caught.value)
    assert "books" in text and "'a'" in text and "\n" not in text
