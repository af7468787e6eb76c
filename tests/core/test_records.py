from pathlib import Path
from typing import Literal

import pytest

from expertflow.core.errors import DataError
from expertflow.core.records import Record, from_json, read_part


class Inner(Record, frozen=True, kw_only=True):
    n: int


class Outer(Record, frozen=True, kw_only=True):
    kind: Literal["a", "b"]
    inner: Inner


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surplus": 1}, "r.json: object contains unknown field surplus"),
        ({"kind": "c"}, "invalid enum value 'c'"),
        ({"inner": {"n": "1"}}, "r.json.inner.n: expected int, got str"),
        ({"inner": {"n": True}}, "expected int, got bool"),
    ],
)
def test_a_wrong_record_is_refused_with_its_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_json(Outer, {"kind": "a", "inner": {"n": 1}, **change}, where="r.json")


@pytest.mark.parametrize("spoilt", [b"", bytes(9), b'{"n": ', None])
def test_a_part_of_a_spoilt_record_is_a_data_error(tmp_path: Path, spoilt: bytes | None) -> None:
    path = tmp_path / "record.json"
    if spoilt is not None:
        path.write_bytes(spoilt)
    with pytest.raises(DataError, match=r"record\.json: "):
        read_part(int, path, "n")
