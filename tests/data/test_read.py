"""Any number of shards reads every record once, in order, like the standard library."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from expertflow.core.errors import DataError
from expertflow.data import read
from expertflow.data.formats import texts
from expertflow.data.parse import MAX_DEPTH, parse_object
from expertflow.data.read import iter_shard
from expertflow.data.records import DataFile
from expertflow.data.reject import RawRecord, Reject

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
    (b'{"a": "x', "not_json", None),
    (b"[1]", "not_an_object", None),
    (b"null", "not_an_object", None),
    (b'{"a": 1} {"a": 2}', "not_json", None),
    (b"{'a': 1}", "not_json", None),
    (b'{"a": None}', "not_json", None),
    (b'{"a": NaN}', "not_finite", "a"),
    (b'{"x": {"a": [-Infinity]}}', "not_finite", "x"),
    (b'{"a": 1e999}', "not_finite", "a"),
    (b'{"a": 1, "a": 1}', "duplicate_key", None),
    (b'{"x": [{"b" :1, "b"\t: 2}], "y": "\\": "}', "duplicate_key", None),
    (b'{"a": 1, "\\u0061": 1}', "duplicate_key", None),
    (b'{"a\\\\": 1, "a\\\\": 2}', "duplicate_key", None),
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


@settings(max_examples=50)
@given(value=OBJECTS, ascii_only=st.booleans(), colon=COLONS, indent=st.sampled_from([None, 1]))
@example({"a": ["\ufeff\u2028\x85\U0001f600", 2**64 - 1, -(2**63), 1e300]}, True, ":", None)
def test_values_are_those_of_the_standard_library(
    value: dict[str, Any], ascii_only: bool, colon: str, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, separators=(",", colon), indent=indent)
    # As text: 1 and 1.0 and true are equal in Python.
    assert json.dumps(parse_object(text.encode())) == json.dumps(json.loads(text))


@settings(max_examples=50)
@given(value=OBJECTS.filter(bool), colon=COLONS, nested=st.booleans(), data=st.data())
def test_any_duplicate_key_is_found(
    value: dict[str, Any], colon: str, nested: bool, data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(sorted(value)))
    text = json.dumps(value, separators=(",", colon))
    text = f"{text[:-1]},{json.dumps(key)}{colon}0}}"
    text = f'{{"outer": [0, {text}]}}' if nested else text
    with pytest.raises(Reject) as caught:
        parse_object(text.encode())
    assert caught.value.reason == "duplicate_key"


def test_an_object_that_is_cut_anywhere_is_rejected() -> None:
    line = '{"a": "x\\n\\u00e9ü\\\\", "b" : [1, -2.5e+10, true, null, {"c": {}}], "d": "\\ud83d"}'
    for end in range(1, len(line.encode())):
        with pytest.raises(Reject) as caught:
            parse_object(line.encode()[:end])
        assert caught.value.reason in ("not_json", "not_utf8"), line.encode()[:end]
    with pytest.raises(Reject, match="not_json: Invalid control character at character 9"):
        parse_object(b'{"a": "x\r\n')
    with pytest.raises(Reject, match="write it with json"):
        parse_object(b"{'a': 1}")


Records = list[dict[str, Any]]


def jsonl(records: Records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_csv(path: Path, records: Records) -> None:
    rows = [("n", "text"), *((str(r["n"]), r["text"]) for r in records)]
    path.write_text("".join('{},"{}"\r\n'.format(*row) for row in rows), encoding="utf-8")


def write_arrow(path: Path, records: Records) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS: dict[str, Callable[[Path, Records], object]] = {
    ".jsonl": lambda path, records: path.write_bytes(jsonl(records)),
    ".jsonl.gz": lambda path, records: path.write_bytes(gzip.compress(jsonl(records))),
    ".ndjson.zst": lambda path, records: path.write_bytes(zstandard.compress(jsonl(records))),
    ".json": lambda path, records: path.write_text(json.dumps(records, indent=1)),
    ".csv": write_csv,
    ".parquet": lambda path, records: pq.write_table(
        pa.Table.from_pylist(records), path, row_group_size=4
    ),
    ".arrow": write_arrow,
    ".feather": lambda path, records: feather.write_feather(pa.Table.from_pylist(records), path),
}


def describe(path: Path, **options: Any) -> DataFile:
    return read.describe_file(path, sha256="", options=options)


def read_shards(files: tuple[DataFile, ...], n_shards: int = 1, **options: Any) -> list[RawRecord]:
    return [
        record
        for index in range(n_shards)
        for record in iter_shard(files, index=index, n_shards=n_shards, options=options)
    ]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(WRITERS)), st.lists(st.integers(0, 300), min_size=1)),
        min_size=1,
        max_size=4,
    ),
    n_shards=st.integers(2, 40),
)
def test_shards_read_every_record_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, list[int]]], n_shards: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    files, wanted = [], []
    for i, (suffix, lengths) in enumerate(parts):
        records = [{"n": i * 1000 + k, "text": "ü" * n} for k, n in enumerate(lengths)]
        path = folder / f"{i}{suffix}"
        WRITERS[suffix](path, records)
        files.append(describe(path))
        wanted += [record["n"] for record in records]
    whole = read_shards(tuple(files))
    assert [int(record.value["n"]) for record in whole if record.value] == wanted
    assert read_shards(tuple(files), n_shards) == whole


@given(
    rows=st.lists(st.sampled_from(["{}", '{"a": "\u2028\x85\x0c"}', "", "  ", "\r", "x", "{}\r"])),
    ends=st.booleans(),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    n_shards=st.integers(1, 9),
    block_bytes=st.integers(3, 30),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_are_lines_of_the_file_in_any_shard(
    tmp_path: Path, rows: list[str], ends: bool, mark: bytes, n_shards: int, block_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + "\n".join(rows).encode() + b"\n" * ends)
    wanted = [number for number, row in enumerate(rows, start=1) if row.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "BLOCK_BYTES", block_bytes)
        patch.setattr(texts, "BUFFER_BYTES", 4)
        file = describe(path)
        assert sum(file.n_newlines) == path.read_bytes().count(b"\n")
        assert [record.number for record in read_shards((file,), n_shards)] == wanted
        assert file.n_records == len(wanted)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("n_shards", [1, 3, 50])
def test_every_fault_has_its_code_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, n_shards: int
) -> None:
    monkeypatch.setattr(texts, "MAX_RECORD_BYTES", 30_000)
    bad = [*FAULTS, (b'{"q": "' + b"x" * 50_000 + b'"}', "record_too_large", None)]
    path = tmp_path / f"bad{suffix}"
    raw = b'\xef\xbb\xbf{"q": 0}\r\n\n' + b"\n".join(b'{"q": 1}\n' + line for line, *_ in bad)
    # A line of exactly the maximum size, and one as deep as possible.
    raw += b'\n{"q": "' + b"x" * (30_000 - len(b'{"q": ""}')) + b'"}\n'
    raw += b'{"q": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}\n"
    path.write_bytes(gzip.compress(raw) if suffix.endswith(".gz") else raw)
    file = describe(path)
    assert file.notes == ("starts with a byte order mark",)
    records = read_shards((file,), n_shards)
    found = {r.where: [r.fault.reason, r.fault.field] for r in records if r.fault}
    assert found == {f"{path}, line {4 + 2 * i}": why for i, (_, *why) in enumerate(bad)}
    n_lines = 2 * len(bad) + 4
    assert [r.number for r in records if r.value] == [1, *range(3, n_lines, 2), n_lines]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_file_that_shrank_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"{}\n" * 9)
    file = describe(path)
    path.write_bytes(b"{}\n" * 8)
    with pytest.raises(DataError, match="changed since it was fetched"):
        read_shards((file,))
