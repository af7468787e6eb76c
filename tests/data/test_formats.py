"""Every format yields records with their positions; a misnamed file is a one-line error."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from test_read import describe, read_shards

from expertflow.core.errors import ConfigError, DataError
from expertflow.data.formats import texts
from expertflow.data.settings import ReadOptions

# Without the time of day: these bytes are in test names, which must be the same in all workers.
gzipped = partial(gzip.compress, mtime=0)
PACKERS = {"": bytes, ".gz": gzipped, ".zst": zstandard.compress}


def seen(path: Path, raw: bytes, **options: Any) -> list[tuple[int, Any]]:
    """Write and read a file: each record's number with its value, or the code of its fault."""
    path.write_bytes(PACKERS.get(path.suffix, bytes)(raw))
    records = read_shards((describe(path, **options),), 2, **options)
    return [(r.number, r.fault.reason if r.fault else r.value) for r in records]


JSON = [
    (b'[{"a": 1},\n {"a": 2}]', [(1, {"a": 1}), (2, {"a": 2})]),
    (b'\xef\xbb\xbf[\n{"a":\n "]}"\n}, {"b": [{}]}\n]\n', [(2, {"a": "]}"}), (4, {"b": [{}]})]),
    (b'{"a": 1}\n\n{\n"a": 2}{"a": 3}', [(1, {"a": 1}), (3, {"a": 2}), (4, {"a": 3})]),
    (b"[]", []),
    (b'[\n{}, [1], 7, "x", null]', [(2, {}), *((2, "not_an_object"),) * 4]),
]


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(("raw", "wanted"), JSON)
def test_json(tmp_path: Path, raw: bytes, wanted: list[Any], packed: str) -> None:
    assert seen(tmp_path / f"a.json{packed}", raw) == wanted


OBJECTS = st.dictionaries(
    st.text('ab{}[]\\",:\n'), st.text('ab{}[]\\",:\nü') | st.lists(st.none()), max_size=4
)


@settings(max_examples=40)
@given(values=st.lists(OBJECTS), indent=st.sampled_from([None, 2]), n_bytes=st.integers(1, 9))
def test_json_is_read_with_a_window_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, n_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "BUFFER_BYTES", n_bytes)
        assert [r.value for r in read_shards((describe(path),))] == values


def test_an_object_too_large_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(texts, "BUFFER_BYTES", 7)
    large = json.dumps({"a": '\\"{' * 90, "b": ["}"] * 90}, indent=1).encode()
    for first, said in ((b"{}", "line 2: over "), (b'{"a": 1 2}', "line 1: not JSON .* on line 1")):
        with pytest.raises(DataError, match=rf"a\.json, {said}"):
            seen(tmp_path / "a.json", b"[" + first + b",\n" + large + b",\n{}]")


CSV = [
    (b"a,b\n1,x\r\n2,\n", [(2, {"a": "1", "b": "x"}), (3, {"a": "2", "b": ""})]),
    (b'a\n"1\n\n2 ""y"""\n\n3', [(2, {"a": '1\n\n2 "y"'}), (6, {"a": "3"})]),
    (b"\xef\xbb\xbfa,b\n1\n1,2,3\n", [(2, "ragged_row"), (3, "ragged_row")]),
    (b"a,b\n1,\xe9\n1,2\n", [(2, "not_utf8"), (3, {"a": "1", "b": "2"})]),
    (b"a,b\n1,\0\n1,2\n", [(2, "nul_character"), (3, {"a": "1", "b": "2"})]),
    (b'a,b\n"1"x,2\n1,2\n', [(2, "not_csv"), (3, {"a": "1", "b": "2"})]),
    (b'a,b\n"5" pipe",x\n1,2\n', [(2, "not_csv"), (3, {"a": "1", "b": "2"})]),
    (b'a,b\n"he "said" it\nand, so",2\n1,2\n', [(2, "not_csv"), (4, {"a": "1", "b": "2"})]),
    (b'a\n"1\n2 "x" y\n\n3, 3"\n4\n', [(2, "not_csv"), (6, {"a": "4"})]),
    (b"a,b\n", []),
]  # fmt: skip


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(("raw", "wanted"), CSV)
def test_csv(tmp_path: Path, raw: bytes, wanted: list[Any], packed: str) -> None:
    assert seen(tmp_path / f"a.csv{packed}", raw) == wanted
    assert seen(tmp_path / f"a.tsv{packed}", raw.replace(b",", b"\t")) == wanted


def test_csv_with_another_delimiter(tmp_path: Path) -> None:
    assert seen(tmp_path / "a.csv", b"a;b\n1,5;x\n", delimiter=";") == [(2, {"a": "1,5", "b": "x"})]


def test_csv_with_an_unnamed_delimiter_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a;b\n1,5;x\n2;y\n")
    with pytest.raises(DataError, match=r"'a;b' is the only column; set options\.delimiter .* ';'"):
        describe(path)
    assert seen(path, b"a;b\n2;y\n", delimiter=",") == [(2, {"a;b": "2;y"})]
    path.write_bytes(b'"a";"b"\n')
    with pytest.raises(DataError, match=r"line 1: the header .*, or set options\.del"):
        describe(path)


TEXT = b"one\r\ntwo\n \n\nthree \xc3\xbc\n\n\xff\n"


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("line", [(1, "one"), (2, "two"), (5, "three ü"), (7, "not_utf8")]),
        ("file", [(1, "not_utf8")]),
    ],
)
def test_text(tmp_path: Path, kind: str, wanted: list[Any], packed: str) -> None:
    found = seen(tmp_path / f"a.md{packed}", TEXT, text_records=kind)
    assert [(n, v if isinstance(v, str) else v["text"]) for n, v in found] == wanted
    assert {v["name"] for _, v in found if isinstance(v, dict)} <= {f"a.md{packed}"}


def test_a_text_too_long_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_RECORD_BYTES", 20)
    for name in ("a.txt", "a.txt.gz"):
        with pytest.raises(DataError, match="text_records to line"):
            seen(tmp_path / name, b"x" * 30 + b"\ny")
    found = seen(tmp_path / "a.txt", b"x" * 30 + b"\ny", text_records="line")
    assert found == [(1, "record_too_large"), (2, {"text": "y", "name": "a.txt"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_another_encoding_is_rejected_with_the_fix(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes('a\n{"a": "é"}\n'.encode("cp1252"))
    fault = read_shards((describe(path),))[-1].fault
    assert fault and fault.reason == "not_utf8"
    assert "iconv -f CP1252 -t UTF-8" in fault.detail


def test_columns_that_json_cannot_represent(tmp_path: Path) -> None:
    text = pa.array([b"ok", b"\xff", b"ok", b"ok"])
    invalid = pa.Array.from_buffers(pa.string(), 4, text.buffers())
    floats = [1.5, None, float("nan"), float("-inf")]
    table = pa.table({"x": floats, "t": invalid, "b": [b"\xff", None, b"", b""]})
    pq.write_table(table, tmp_path / "a.parquet")
    records = read_shards((describe(tmp_path / "a.parquet"),), 3)
    assert [r.where for r in records] == [f"{tmp_path}/a.parquet, row {i}" for i in range(1, 5)]
    assert records[0].value == {"x": 1.5, "t": "ok", "b": b"\xff"}
    reasons = [r.fault.reason for r in records[1:] if r.fault]
    assert reasons == ["not_utf8", "not_finite", "not_finite"]
    nan = float("nan")
    columns = {
        "list": pa.array([[1.0, nan]]),
        "struct": pa.array([{"a": [{"b": nan}]}]),
        "map": pa.array([[("k", nan)]], pa.map_(pa.string(), pa.float32())),
        "dictionary": pa.array([nan]).dictionary_encode(),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (2,)),
            pa.array([[1.0, nan]], pa.list_(pa.float32(), 2)),
        ),
    }
    for name, column in columns.items():
        pq.write_table(pa.table({name: column}), tmp_path / "b.parquet", store_schema=True)
        (record,) = read_shards((describe(tmp_path / "b.parquet"),))
        assert record.fault
        assert (record.fault.reason, record.fault.field) == ("not_finite", name)
    pq.write_table(table.rename_columns(["x", "x", "b"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="two columns are named 'x'; rename one"):
        describe(tmp_path / "a.parquet")


def test_an_offset_out_of_range_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 1 << 30, 2], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"ab")])
    column = pa.StructArray.from_arrays([texts], ["t"])
    path = tmp_path / "a.arrow"
    batch = pa.record_batch([column], ["t"])
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"cannot be read as Arrow .*out of bounds"):
        read_shards((describe(path),))


def test_a_date_that_python_cannot_represent_is_a_fault_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for kind in (pa.timestamp("us"), pa.date64(), pa.duration("s")):
        table = pa.table({"n": [1, 2, 3], "t": pa.array([0, 10**18, None], kind)})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        records = read_shards((describe(path),))
        faults = [r.fault and (r.fault.reason, r.fault.field) for r in records]
        assert faults == [None, ("not_json", "t"), None]
        assert records[2].value == {"n": 3, "t": None}
    pq.write_table(pa.table({"t": pa.array([None, 0], pa.timestamp("us", "Nowhere"))}), path)
    first, second = read_shards((describe(path.rename(tmp_path / "a.parquet")),))
    assert first.value == {"t": None} and second.fault and second.fault.field == "t"


def test_frames_members_padding_and_upper_case_suffixes_are_read(tmp_path: Path) -> None:
    skipped = b"\x50\x2a\x4d\x18" + (2).to_bytes(4, "little") + b"ab"
    first, second = zstandard.compress(b"{}\n{"), zstandard.compress(b"}")
    for name, raw, values in (
        ("a.jsonl.gz", gzip.compress(b"{}\n{") + gzip.compress(b"}") + b"\0" * 9, [{}, {}]),
        ("a.jsonl.zst", skipped + first + second, [{}, {}]),
        ("a.JSONL", b'{"a": "1"}', [{"a": "1"}]),
        ("A.Csv.GZ", gzipped(b"a\n1\n"), [{"a": "1"}]),
    ):
        (tmp_path / name).write_bytes(raw)
        assert [r.value for r in read_shards((describe(tmp_path / name),))] == values


LINES = b"".join(b'{"n": %d}\n' % i for i in range(20_000))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_damaged_packed_data_are_refused(tmp_path: Path, name: str, suffix: str) -> None:
    packed = PACKERS[suffix](LINES)
    wrong_sum = packed[:-5] + bytes([packed[-5] ^ 1]) + packed[-4:]
    path = tmp_path / (name + suffix)
    for raw in (packed[: len(packed) * 9 // 10], *([wrong_sum] if suffix == ".gz" else [])):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"data is damaged or ends early \(.*fetch it again"):
            read_shards((describe(path),))


PARQUET = b"PAR1" + b"x" * 50
WRONG = [
    ("a.jsonl", gzipped(b"{}"), "is gzip data; rename it to a.jsonl.gz"),
    ("a.jsonl.gz", zstandard.compress(b"{}"), "is zstd data; rename it to a.jsonl.zst"),
    ("a.jsonl.gz", b"{}\n", "is not gzip data; rename it to a.jsonl,"),
    ("a.jsonl.gz", gzipped(gzipped(b"{}")), "compressed twice"),
    ("a.jsonl", b'[{"a": 1},\n{"a": 2}]\n', "is a JSON array, .* rename it to a.json"),
    ("a.jsonl", b'[\n  {"a": 1}\n]', "is a JSON array"),
    ("a.jsonl", b'[{"a": "b"\n},\n{"a": "c"\n}]', "is a JSON array"),
    ("a.jsonl.gz", gzipped(b'{\n "a": 1\n}\n'), "pretty-printed JSON, .* rename it to a.json.gz"),
    ("a.jsonl", '{"a": 1}'.encode("utf-16"), "is UTF-16 .*iconv -f UTF-16 -t UTF-8"),
    ("a.csv", "a,b".encode("utf-16-le"), "is UTF-16"),
    ("a.json", "{}".encode("utf-32-be"), "is UTF-16 or UTF-32"),
    ("a.jsonl", PARQUET, "is Parquet data; rename it to a.parquet"),
    ("a.jsonl", b"PK\x03\x04...", "is a zip archive; unpack it"),
    ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
    ("a.json", b"\n<!DOCTYPE html><html>", "is an HTML page"),
    ("a.parquet", b"hello", "cannot be opened as Parquet"),
    ("a.parquet", PARQUET, "cannot be read as Parquet"),
    ("a.arrow", b"ARROW1" + b"x" * 50, "cannot be read as Arrow"),
    # A missing end is not the fault of one record.
    ("a.json", b'[{"a": 1},\n', "ends on line 2 inside the array"),
    ("a.json", b'[{"a": 1},\n{"a": 2', r"line 2: not JSON \(Expecting ',' delimiter on line 2\)"),
    ("a.json", b'[{"a": {\n},\n{"b": 2}]', r"line 1: not JSON .* on line 3\); correct it"),
    ("a.json", b'{"a": "x\n{"a": 2}\n', "line 1: not JSON"),
    ("a.json", b"[{},,{}]", r"line 1: not JSON \(Expecting value"),
    ("a.json", b"[{}\n{}]", "line 2: no comma before this element"),
    ("a.csv", b'a,b\n1,2\n1,"2\n3\n', "line 3: a quote opens here and is not closed by line 4"),
    ("a.csv", b'a,b\n1,"2 "x" \n3,4\n', "line 2: a quote opens here and is not closed by line 3"),
    ("a.csv", b"a,b,a\n1,2,3\n", "line 1: two columns are named 'a'"),
    ("a.csv", b"\n\n", "no header row"),
    ("a.csv", b"sep=;\na;b\n", "'sep=;' is the only column; remove this line, and set options"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "raw", "message"), WRONG)
def test_a_misnamed_file_is_rejected(tmp_path: Path, name: str, raw: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message) as caught:
        read_shards((describe(path),))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b'{"a": \n{"a": 1}\n', b'[{"r": 1}]\n[{"r": 2}]\n', b"[1, 2]\n", b"\0\0\0\0\n{}\n"]
)
def test_bad_lines_do_not_reject_a_file(tmp_path: Path, raw: bytes) -> None:
    assert seen(tmp_path / "a.jsonl", raw)


def test_impossible_options() -> None:
    for key, value, message in (
        (1, "x", "options.1: unknown"),
        ("encodng", "utf-8", "options.encodng: unknown; .* text_records, delimiter"),
        ("text_records", "word", "options.text_records: 'word' is not valid: invalid enum"),
        ("delimiter", "::", "is not one character"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReadOptions.from_manifest({key: value})
