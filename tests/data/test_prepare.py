"""One shard, from raw bytes to documents, with the records that real files go wrong with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expertflow.core.errors import DataError
from expertflow.data.documents import iter_documents
from expertflow.data.prepare import prepare_shard
from expertflow.data.read import iter_shard
from expertflow.data.records import (
    DataFile,
    PrepareSpec,
    Segment,
    ShardPlan,
    ShardRecord,
    SourceRecord,
    SourceSpec,
)
from expertflow.data.render import question_of, question_text

SPEC = PrepareSpec(
    source=SourceSpec(name="s", kind="local", prompt="{q}", completion="{a}"),
    system_prompt=None,
    supervise="completion",
    evaluation_fields=(),
    max_rejected_fraction=1.0,
)


def source_of(path: Path, kind: str = "jsonl", n_records: int | None = None) -> SourceRecord:
    file = DataFile(
        path=str(path),
        format=kind,  # type: ignore[arg-type]
        n_bytes=path.stat().st_size,
        n_records=n_records,
        sha256="",
    )
    return SourceRecord(
        name="s", kind="local", revision=None, licence=None, n_shards=1, files=(file,), artefacts={}
    )


def prepare(path: Path, spec: PrepareSpec = SPEC, **source: Any) -> ShardRecord:
    return prepare_shard(
        spec=spec,
        source=source_of(path, **source),
        plan=ShardPlan(source="s", shard="000", index=0, n_shards=1),
        output=path.with_name("documents.arrow"),
        rejected=path.with_name("rejected.jsonl"),
    )


def documents(record: ShardRecord) -> list[Any]:
    return list(iter_documents(record, dict.fromkeys(range(record.n_documents), False)))


BAD_LINES = {
    "not_utf8": b'{"q": "\xff", "a": "x"}',
    "not_json": b'{"q": "cut off',
    "not_an_object": b"[1, 2]",
    "missing_field": b'{"q": "x"}',
    "null_field": b'{"q": "x", "a": null}',
    "empty_field": b'{"q": "  ", "a": "x"}',
    "not_text": b'{"q": 3, "a": "x"}',
    "lone_surrogate": b'{"q": "\\ud800", "a": "x"}',
}


def test_every_bad_record_is_counted_under_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    good = b'{"q": "ask", "a": "tell"}'
    path.write_bytes(b"\n".join([good, *BAD_LINES.values(), good]))
    record = prepare(path)
    assert record.n_rejected_by_reason == dict.fromkeys(sorted(BAD_LINES), 1)
    assert (record.n_records, record.n_documents) == (len(BAD_LINES) + 2, 2)
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").open()]
    assert lines[0]["where"] == f"{path}:{len(good) + 1}"


def test_too_many_rejects_stop_the_run_with_the_first_one_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"{}\n" * 3)
    with pytest.raises(DataError, match="3 of 3 records rejected, most for 'missing_field'"):
        prepare(path, replace(SPEC, max_rejected_fraction=0.5))


def test_line_separators_inside_strings_do_not_end_a_record(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    text = "a\u2028b\u2029c\u0085d"
    line = json.dumps({"q": text, "a": "x"}, ensure_ascii=False)
    path.write_text(line + "\n" + line.replace('"x"', '"y"'), encoding="utf-8")
    record = prepare(path)
    assert record.n_documents == 2
    assert documents(record)[0].segments[1].text == "user\n" + text


@pytest.mark.parametrize("n_shards", [1, 2, 3, 7, 40])
def test_any_number_of_shards_reads_every_record_once(tmp_path: Path, n_shards: int) -> None:
    files = []
    for name in "ab":
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"q": f"{name}{i}" * (i % 5)}) + "\n" for i in range(20))
        )
        files.append(source_of(path).files[0])
    read = [
        record.value
        for index in range(n_shards)
        for record in iter_shard(tuple(files), index=index, n_shards=n_shards)
    ]
    assert read == [{"q": f"{name}{i}" * (i % 5)} for name in "ab" for i in range(20)]


@pytest.mark.parametrize("n_shards", [1, 3])
def test_parquet_is_read_by_rows(tmp_path: Path, n_shards: int) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"q": [f"q{i}" for i in range(2500)]}), path)
    source = source_of(path, "parquet", 2500)
    read = [
        record.value["q"]
        for index in range(n_shards)
        for record in iter_shard(source.files, index=index, n_shards=n_shards)
        if record.value
    ]
    assert read == [f"q{i}" for i in range(2500)]


def test_a_chat_document_supervises_the_answer_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"q": "ask", "a": "tell"}')
    segments = documents(prepare(path, replace(SPEC, system_prompt="be kind")))[0].segments
    assert "".join(s.text for s in segments) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nask<|im_end|>\n"
        "<|im_start|>assistant\ntell<|im_end|>\n"
    )
    assert [s.text for s in segments if s.supervised] == ["assistant\ntell", "<|im_end|>"]
    question, answer = question_of(segments)
    assert (question[-1], answer) == (Segment(text="assistant\n"), "tell")
    assert question_text(segments) == "be kind\nask"


def test_messages_learn_every_assistant_turn(tmp_path: Path) -> None:
    turns = [{"role": r, "content": c} for r, c in [("user", "1"), ("assistant", "2")] * 2]
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"m": turns}) + "\n" + json.dumps({"m": [{"role": "robot"}]}))
    spec = replace(SPEC, source=SourceSpec(name="s", kind="local", messages="m"))
    record = prepare(path, spec)
    assert record.n_rejected_by_reason == {"unknown_role": 1}
    learned = [s.text for s in documents(record)[0].segments if s.supervised]
    assert learned == ["assistant\n2", "<|im_end|>"] * 2


def test_where_keeps_matching_records_only(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = [{"q": "x", "a": str(i), "ok": i % 2 == 0} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    source = replace(SPEC.source, where={"ok": True})
    assert prepare(path, replace(SPEC, source=source)).n_documents == 3
