import pytest

from expertflow.core.strict_json import depth
from expertflow.data.checks.registry import build_checks
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck

RUN = build_checks((FieldCheck(field="a", check="json"),), source="s")


@pytest.mark.parametrize("text", ["1", "null", '"x"', "[]", ' {"a": [1.5, true]} ', '"\\ud800"'])
def test_json_passes_as_it_is(text: str) -> None:
    record = {"a": text}
    assert RUN(record) is record


@pytest.mark.parametrize("value", [{}, [], {"a": [1, {"b": None}]}])
def test_what_was_parsed_before_passes(value: object) -> None:
    record = {"a": value}
    assert RUN(record) is record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{'a': 1}",
        "[1,]",
        "NaN",
        "[Infinity]",
        "-Infinity",
        '{"a": 1, "a": 2}',
        '{"x": {"a": 1, "a": 1}}',
        "1e999",
        "1" * 400,
        "// no\n1",
        "1 2",
        "[" * 65 + "]" * 65,
        "[" * 100_000,
        '"\x00"',
        "01",
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_strict_json(text: str) -> None:
    with pytest.raises(Filtered) as caught:
        RUN({"a": text})
    assert caught.value.reason == "json_unparsable"
    assert caught.value.field == "a"


def test_a_parsed_value_too_deep_is_filtered() -> None:
    value: list[object] = []
    for _ in range(5_000):
        value = [value]
    with pytest.raises(Filtered, match="5,001 levels"):
        RUN({"a": value})


def test_depth() -> None:
    assert [depth(v) for v in (1, [], [[]], {"a": [{}]})] == [0, 1, 2, 3]
