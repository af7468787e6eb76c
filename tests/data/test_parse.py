"""A line is read as the standard library reads it, or rejected under the one code of its fault."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.data.parse import MAX_DEPTH, parse_object
from expertflow.data.reject import Reject

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
    | st.sampled_from(['"', '":', '\\":', "\\", '{"a":1}', " :", "\\u0000", "a\\"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(SCALARS.map(str), inner), max_leaves=9
)
OBJECTS = st.dictionaries(SCALARS.map(str), VALUES)
COLONS = st.sampled_from([":", ": ", " : ", "\t:", "\r\n:"])

FAULTS = [
    (b'{"a": "\xe9"}', "not_utf8", None),
    (b'{"a": "\xed\xa0\x80"}', "not_utf8", None),
    (b'{"a": "\xff', "not_utf8", None),
    (b"hello", "not_json", None),
    (b'{"a": 1,}', "not_json", None),
    (b'{"a": "x\ty"}', "not_json", None),
    (b'{"a": tru}', "not_json", None),
    (b'{"a": "x', "truncated", None),
    (b"[1]", "not_an_object", None),
    (b"null", "not_an_object", None),
    (b'{"a": 1} {"a": 2}', "several_values", None),
    (b"{'a': 1}", "python_repr", None),
    (b'{"a": None}', "python_repr", None),
    (b'{"a": NaN}', "not_finite", "a"),
    (b'{"x": {"a": [-Infinity]}}', "not_finite", "x"),
    (b'{"a": 1e999}', "not_finite", "a"),
    (b'{"a": 1, "a": 1}', "duplicate_key", "a"),
    (b'{"x": [{"b" :1, "b"\t: 2}], "y": "\\": "}', "duplicate_key", "b"),
    (b'{"a": 1, "\\u0061": 1}', "duplicate_key", "a"),
    (b'{"a\\\\": 1, "a\\\\": 2}', "duplicate_key", "a\\"),
    (b'{"a": 18446744073709551616}', "integer_over_64_bits", "a"),
    (b'{"a": [-9223372036854775809]}', "integer_over_64_bits", "a"),
    (b'{"a": ' + b"1" * 5000 + b"}", "integer_over_64_bits", "a"),
    (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "too_deep", None),
    (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "too_deep", None),
    (b'{"a": "\\ud800"}', "lone_surrogate", "a"),
    (b'{"\\udfff": 1}', "lone_surrogate", "\\udfff"),
    (b'{"a": {"b": ["\\u0000"]}}', "nul_character", "a"),
    (b'{"a": "\0"}', "nul_character", None),
    (b'\xef\xbb\xbf{"a": 1}', "byte_order_mark", None),
]


@pytest.mark.parametrize(("line", "reason", "field"), FAULTS)
def test_every_fault_has_its_code(line: bytes, reason: str, field: str | None) -> None:
    with pytest.raises(Reject) as caught:
        parse_object(line)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    f"{caught.value} {caught.value.value}".encode()


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": 18446744073709551615, "b": -9223372036854775808, "c": 1e300}',
        b'{"a": "\\\\u0000 \\ud83d\\ude00", "\\":": "\\":"}\r\n',
        b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}",
        '{"a": "\ufeff\u2028\x85"}'.encode(),
    ],
)
def test_what_only_looks_like_a_fault_is_read(line: bytes) -> None:
    assert parse_object(line) == json.loads(line)


@given(value=OBJECTS, ascii_only=st.booleans(), colon=COLONS, indent=st.sampled_from([None, 1]))
def test_values_are_those_of_the_standard_library(
    value: dict[str, Any], ascii_only: bool, colon: str, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, separators=(",", colon), indent=indent)
    # By text: 1 and 1.0 and true are equal to Python.
    assert json.dumps(parse_object(text.encode())) == json.dumps(json.loads(text))


@given(value=OBJECTS.filter(bool), colon=COLONS, nested=st.booleans(), data=st.data())
def test_any_doubled_key_is_found(
    value: dict[str, Any], colon: str, nested: bool, data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(sorted(value)))
    text = json.dumps(value, separators=(",", colon))
    text = f"{text[:-1]},{json.dumps(key)}{colon}0}}"
    text = f'{{"outer": [0, {text}]}}' if nested else text
    with pytest.raises(Reject) as caught:
        parse_object(text.encode())
    assert caught.value.reason == "duplicate_key"


def test_an_object_that_is_cut_anywhere_is_truncated() -> None:
    line = '{"a": "x\\n\\u00e9ü\\\\", "b" : [1, -2.5e+10, true, null, {"c": {}}], "d": "\\ud83d"}'
    for end in range(1, len(line.encode())):
        with pytest.raises(Reject) as caught:
            parse_object(line.encode()[:end])
        assert caught.value.reason == "truncated", line.encode()[:end]
