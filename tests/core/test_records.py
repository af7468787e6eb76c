import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json
from expertflow.core.records import Record, from_json, read_part, read_record, to_json, write_record


class Inner(Record, frozen=True, kw_only=True):
    n: int
    share: float | None = None


class Outer(Record, frozen=True, kw_only=True):
    kind: Literal["a", "b"]
    inner: Inner
    many: tuple[Inner, ...]
    by_name: dict[str, int]


def sample() -> Outer:
    return Outer(kind="a", inner=Inner(n=1), many=(Inner(n=2, share=0.5),), by_name={"x": 1})


def test_a_record_survives_the_way_to_disk_and_back(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", sample())
    assert read_record(Outer, tmp_path / "r.json") == sample()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surplus": 1}, "r.json: object contains unknown field surplus"),
        ({"kind": "c"}, "invalid enum value 'c'"),
        ({"inner": {"n": "1"}}, "r.json.inner.n: expected int, got str"),
        ({"inner": {"n": True}}, "expected int, got bool"),
        ({"inner": {}}, "r.json.inner: object missing required field n"),
        ({"many": {"n": 2}}, "r.json.many: expected array, got object"),
    ],
)
def test_a_wrong_record_is_refused_with_its_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_json(Outer, {**to_json(sample()), **change}, where="r.json")


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: the record is missing"):
        read_record(Outer, tmp_path / "none.json")


@pytest.mark.parametrize("spoilt", [b"", bytes(9), b'{"n": ', None])
def test_a_part_of_a_spoilt_record_is_a_data_error(tmp_path: Path, spoilt: bytes | None) -> None:
    path = tmp_path / "record.json"
    if spoilt is not None:
        path.write_bytes(spoilt)
    with pytest.raises(DataError, match=r"record\.json: "):
        read_part(int, path, "n")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
def test_equal_values_have_one_canonical_text(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
