"""One shard, from raw bytes to documents: what is kept, what is not, and why."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from support import ROOT, SCRIPTS
from test_shapes import SPEC

from expertflow.core.errors import DataError
from expertflow.data.documents import Document, KeptRows, group_hash, iter_documents
from expertflow.data.messages import ASSISTANT_FIRST, EMPTY_SYSTEM
from expertflow.data.prepare import prepare_shard, without_emails
from expertflow.data.read import describe_file
from expertflow.data.records import ShardRecord, SourceRecord
from expertflow.data.selection import STATUS
from expertflow.data.settings import BenchmarkSpec, FieldCheck, NearSpec, PrepareSpec, SourceSpec

KEY, ADDRESS = "AKIA" + "QYLPMN5HHHFPZAM2", "ann" + "@site.org"
GOOD = {"q": "ask", "a": "tell"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


def prepare(
    path: Path, spec: PrepareSpec = SPEC, *, index: int = 0, n_shards: int = 1, **changes: Any
) -> ShardRecord:
    """Prepare a shard of a file, with ``changes`` to the source's settings."""
    source = SourceRecord(
        name="s", preset="demo", kind="local", revision=None, card_license=None,
        n_shards=n_shards, files=(describe_file(path, sha256=""),), artifacts={},
    )  # fmt: skip
    return prepare_shard(
        spec=replace(spec, source=replace(spec.source, **changes)),
        source=source,
        shard=f"{index:03d}",
        output=path.with_name(f"documents-{index}-{n_shards}.arrow"),
        rejected=path.with_name("rejected.jsonl"),
    )


def documents(record: ShardRecord) -> list[Document]:
    rows = np.arange(record.n_documents, dtype=np.int32)
    kept = KeptRows(rows, np.zeros(len(rows), bool), np.ones_like(rows))
    return list(iter_documents(record, kept))


def column(record: ShardRecord, name: str) -> list[Any]:
    with pa.memory_map(record.path) as source:
        return list(pa.ipc.open_stream(source).read_all()[name].to_pylist())


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rejected(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_name("rejected.jsonl").open()]


def test_every_record_is_a_document_or_has_a_reason_and_a_place(path: Path) -> None:
    record = prepare(write(path, GOOD, {"q": "x"}, {"q": 3, "a": "x"}, GOOD))
    assert (record.n_records, record.n_documents) == (4, 2)
    assert record.n_rejected_by_reason == {"missing_field": 1, "not_text": 1}
    assert rejected(path) == [
        {"path": str(path), "line": 2, "reason": "missing_field", "field": "a", "value": None,
         "detail": "the record has no field 'a'; it has q"},
        {"path": str(path), "line": 3, "reason": "not_text", "field": "q", "value": "3",
         "detail": "expected text, found int; in a template, {q:json} writes it"},
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"r.jsonl, line 2: missing_field in field a"):
        prepare(path, replace(SPEC, on_reject="stop"), n_shards=2)
    assert not list(path.parent.glob("documents-0-2*"))


def test_where_and_checks_select_records(path: Path) -> None:
    fields = [("en", 1, {}), ("en", 2, {}), ("de", 1, {}), ("en", 1, {"id": 7})]
    write(path, *({**GOOD, "l": language, "n": n, **own} for language, n, own in fields))
    record = prepare(path, where={"l": "en", "n": 1})
    assert record.n_records == 2
    # A document is named by its own id, or by its place.
    assert [document.document_id for document in documents(record)] == ["s/r.jsonl:1", "s/7"]
    checks = (FieldCheck(field="a", check="length", max_chars=3),)
    write(path, *[{"q": "x", "a": a} for a in ("ab", "abcd", "abc")])
    record = prepare(path, replace(SPEC, on_reject="stop"), checks=checks)
    assert (record.n_documents, record.n_rejected_by_reason) == (2, {})
    assert record.n_filtered_by_reason == {"too_long": 1}
    assert rejected(path)[0]["line"] == 2


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (pa.date32(), "2024-01-01"),
        (pa.timestamp("us"), "2024-01-01"),
        (pa.timestamp("ns"), "2024-01-01 00:00:00"),
        (pa.timestamp("s", "UTC"), "2024-01-01"),
        (pa.timestamp("s", "Europe/Berlin"), "2023-12-31T23:00:00Z"),
        (pa.string(), "2024-01-01"),
    ],
)
def test_where_compares_a_date_with_columns_of_dates(
    tmp_path: Path, kind: pa.DataType, wanted: str
) -> None:
    days = pa.array(["2024-01-01", "2024-01-02", None])
    if pa.types.is_timestamp(kind):
        at_midnight = pc.strptime(days, format="%Y-%m-%d", unit="s")
        days = pc.assume_timezone(at_midnight, kind.tz) if kind.tz else at_midnight
    table = pa.table({"q": ["a", "b", "c"], "a": ["1", "2", "3"], "day": days.cast(kind)})
    pq.write_table(table, tmp_path / "r.parquet")
    for where, n_documents in (({"day": wanted}, 1), ({"day": "soon"}, 0), ({"day": 1}, 0)):
        assert prepare(tmp_path / "r.parquet", where=where).n_documents == n_documents


def test_a_field_with_two_names_is_the_first_that_has_a_value(path: Path) -> None:
    spec = replace(SPEC, evaluation_fields=("x|y",))
    write(path, *({**GOOD, **own} for own in ({"y": 1}, {"x": None, "y": 2}, {"x": 3, "y": 4})))
    found = [document.fields for document in documents(prepare(path, spec))]
    assert found == [{"x|y": 1}, {"x|y": 2}, {"x|y": 3}]
    write(path, *({**GOOD, "x": "z" * (3 << 20)} for _ in range(4)))
    with pa.memory_map(prepare(path, spec).path) as source:
        # A batch with too many bytes of fields cannot be written.
        assert [batch.num_rows for batch in pa.ipc.open_stream(source)] == [2, 2]
    write(path, {**GOOD, "x": None}, GOOD)
    record = prepare(path, spec)
    assert record.n_rejected_by_reason == {"missing_field": 1}
    assert [document.fields for document in documents(record)] == [{"x|y": None}]


def test_email_addresses_get_pseudonyms_everywhere(path: Path) -> None:
    write(path, {"q": "ask ann@site.org", "a": "ann@site.org", "x": ["bo@site.org"]})
    spec = replace(SPEC, evaluation_fields=("x",))
    (document,) = documents(prepare(path, spec, pseudonymize_emails=True))
    question, answer = (turn.content for turn in document.body.turns)
    assert question == f"ask {answer}" and "site.org" not in question
    assert "site.org" not in json.dumps(document.fields)
    nested = {"x": {"bo@site.org": [("cy@site.org", 1)]}}
    assert "site.org" not in json.dumps(without_emails(nested))


def test_benchmark_questions_are_not_trained_on(path: Path) -> None:
    words = "how many of the five red apples did the two children eat on that long day"
    bench = write(path.with_name("bench.jsonl"), {"text": words})
    spec = BenchmarkSpec(path=str(bench), text="{text}", n_words=8, sha256="")
    write(path, {"q": f"Tell me: {words.upper()}?", "a": "3"}, GOOD)
    record = prepare(path, replace(SPEC, benchmarks=(spec,)))
    assert (record.n_documents, record.n_filtered_by_reason) == (1, {"in_benchmark": 1})


def test_documents_that_count_as_one_share_a_hash_or_a_group(path: Path) -> None:
    pairs = (("a  b", "c"), ("a\r\nb", "c "), ("A B", "d"))
    write(path, *[{"q": q, "a": a} for q, a in pairs])
    first, second, other = column(prepare(path), "text_hash")
    assert first == second != other
    assert len(set(column(prepare(path, duplicate_fields=("q",)), "text_hash"))) == 1
    write(path, *[{"q": "x", "a": a, "t": t} for a, t in ("cd", "ef")])
    for group, n_groups in ((None, 1), ("t", 2)):
        assert len(set(column(prepare(path, group=group), "group_hash"))) == n_groups
    assert prepare(path, group="none").n_rejected_by_reason == {"no_group": 2}
    write(path, {**GOOD, "t": ""}, {**GOOD, "t": " "})
    assert prepare(path, group="t").n_rejected_by_reason == {"no_group": 2}


def test_a_decimal_is_labeled_like_the_number_it_is(tmp_path: Path) -> None:
    prices = [Decimal("1.50"), Decimal("1.50"), Decimal("2.00")]
    rows = pa.table({"q": ["a", "b", "c"], "a": ["x", "y", "z"], "p": prices})
    pq.write_table(rows, tmp_path / "a.parquet")
    found = prepare(tmp_path / "a.parquet", group="p", category="p")
    assert column(found, "group_hash") == [group_hash(label) for label in ("1.50", "1.50", "2")]
    assert column(found, "category") == ["1.50", "1.50", "2"]


def test_every_reason_is_documented() -> None:
    paths = (SCRIPTS / "expertflow" / "data").rglob("*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in paths)
    found = set(re.findall(r'(?:Reject|Filtered)\(\s*"(\w+)"', code))
    found |= {EMPTY_SYSTEM, ASSISTANT_FIRST}
    documented = re.findall(r"`(\w+)`", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"))
    assert len(found) > 30
    assert {*found, *STATUS} - {"kept"} <= set(documented)


CHAT = replace(SPEC, source=SourceSpec(name="s", kind="local", messages="turns", tools="tools"))


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant") * len(contents)
    return [*turns, *({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))]


def test_a_chat_stays_on_the_side_of_its_first_question(path: Path) -> None:
    unrolled = [{"turns": say(*"abcdef"[:n])} for n in (2, 4, 6)]
    prompted = [{"turns": say("a ", "b", system=s)} for s in ("x", "y", "z")]
    write(path, *unrolled, *prompted, {"turns": say("g", "b")})
    *groups, other = column(prepare(path, CHAT), "group_hash")
    assert len(groups) == 6 and len(set(groups)) == 1 and other not in groups
    assert column(prepare(write(path, {"q": "a", "a": "b"})), "group_hash") == groups[:1]


def test_odd_chats_are_counted_where_they_become_documents(path: Path) -> None:
    empty, (asked, answer) = {"role": "system", "content": " "}, say("a", "b")
    null, system = {**empty, "content": None}, {**empty, "content": "x"}
    chats = [empty, asked, answer], [null, answer, asked], [system, answer], [empty]
    write(path, *({"turns": turns, "c": "x"} for turns in chats), {"turns": chats[0]})
    record = prepare(path, CHAT, category="c")
    roles = [[turn.role for turn in document.body.turns] for document in documents(record)]
    assert roles == [["user", "assistant"], ["assistant", "user"], ["system", "assistant"]]
    assert record.n_noted_by_reason == {"assistant_first": 2, "empty_system_turn": 2}
    assert record.n_rejected_by_reason == {"missing_field": 1, "nothing_to_learn": 1}


def test_the_tools_of_a_chat_count(path: Path) -> None:
    tools = [[{"name": "f"}], [{"name": "g"}], [{"name": "f", "x": f"aws: {KEY}"}]]
    write(path, *[{"turns": say("a", "b"), "tools": t} for t in tools])
    record = prepare(path, CHAT, scan_secrets=True)
    assert record.n_filtered_by_reason == {"secret": 1}
    assert len(set(column(record, "text_hash"))) == 2
    assert len(set(column(record, "group_hash"))) == 1


def test_nulls_of_columns_are_not_keys(path: Path) -> None:
    tools = [{"name": "f", "x": None}, {"name": "g", "x": 1}]
    table = path.with_name("r.parquet")
    pq.write_table(pa.table({"turns": [say("a", "b")], "tools": [tools]}), table)
    write(path, {"turns": say("a", "b"), "tools": tools})
    for file, wanted in ((table, [{"name": "f"}, tools[1]]), (path, tools)):
        (document,) = documents(prepare(file, CHAT))
        assert [tool["function"] for tool in document.body.tools] == wanted


def test_categories_and_groups_are_identified_by_their_value(path: Path) -> None:
    values = ["1", 1, 1.0, 1.5, True, ["x"], None, "", " \t"]
    write(path, *[{**GOOD, "c": c} for c in values])
    names = column(prepare(path, category="c"), "category")
    assert names == ["1", "1", "1", "1.5", "True", "['x']", None, None, None]
    assert column(prepare(path, group="c"), "group_hash") == [group_hash(n) for n in names[:5]]
    # A misspelled category is not silently capped.
    assert prepare(path, category="cc").n_rejected_by_reason == {"missing_field": 9}


SQL = FieldCheck(field="q", check="sql")
SCHEMA = FieldCheck(field="q", check="json_schema", schema_field="a")
LEAKY = {
    "no_json": (f"{{'q': '{KEY} {ADDRESS}'}}", {}),
    "double_key": (f'{{"{KEY} {ADDRESS}": 1, "{KEY} {ADDRESS}": 2}}', {}),
    "template": (json.dumps({"q": [KEY, ADDRESS], "a": "x"}), {}),
    "check": (json.dumps({"q": f"SELECT {KEY} {ADDRESS}", "a": "x"}), {"checks": (SQL,)}),
    "schema": (json.dumps({"q": "1", "a": {"$ref": f"{KEY} {ADDRESS}"}}), {"checks": (SCHEMA,)}),
    "role": (json.dumps({"turns": [{"role": f"{KEY} {ADDRESS}"}]}), {"messages": "turns"}),
}


@pytest.mark.parametrize("setting", ["scan_secrets", "pseudonymize_emails"])
@pytest.mark.parametrize(("line", "source"), LEAKY.values(), ids=LEAKY.keys())
def test_text_excluded_from_documents_appears_nowhere_else(
    path: Path, setting: str, line: str, source: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(f"{line}\n" * 1000)

    def written(**private: Any) -> str:
        caplog.clear()
        record = prepare(path, **source, **private)
        assert record.n_documents == 0
        texts = [path.with_name("rejected.jsonl").read_text(), *record.rejected_examples]
        if record.n_rejected_by_reason:
            assert caplog.messages
            with pytest.raises(DataError, match=r"r.jsonl, line 1: \w+") as caught:
                prepare(path, replace(SPEC, on_reject="stop"), **source, **private)
            assert caught.value.__cause__ is None or not private
            texts.append(str(caught.value))
        return "".join([*texts, *caplog.messages])

    assert KEY in written() or ADDRESS in written()
    found = written(**{setting: True})
    assert KEY not in found and ADDRESS not in found


def test_any_number_of_shards_yields_the_same_documents(path: Path) -> None:
    records = [{"q": f"q{i}" * (i % 7 + 1), "a": "ä" * i, "id": i} for i in range(1, 60)]
    write(path, *records[:30], {"q": "no answer"}, *records[30:])
    spec = replace(SPEC, near=NearSpec(threshold=0.8, n_words=2, n_permutations=32))
    whole = prepare(path, spec)
    one = [replace(d, row=0) for d in documents(whole)]
    for n_shards in (2, 5):
        shards = [prepare(path, spec, index=i, n_shards=n_shards) for i in range(n_shards)]
        assert [replace(d, row=0) for shard in shards for d in documents(shard)] == one
        assert sum(shard.n_rejected_by_reason.get("missing_field", 0) for shard in shards) == 1
    assert prepare(path, spec).sha256 == whole.sha256
