"""Every family of real data becomes documents, by a manifest's own means."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_prepare import prepare, write
from test_shapes import SPEC

from expertflow.core.files import read_json_lines
from expertflow.data.settings import FieldCheck, SourceSpec

pytestmark = pytest.mark.long

SQL = FieldCheck(field="sql", check="sql", dialect="sqlite")
# file; how the manifest reads it; records; rejected; kept out by a check
FAMILIES: dict[str, tuple[str, dict[str, Any], int, dict[str, int], dict[str, int]]] = {
    "wikisql": (
        "expert-sql/wikisql/records.jsonl",
        {"prompt": "{schema}\n{question}", "completion": "{sql}", "group": "table_id",
         "checks": (SQL,)},
        6990, {}, {},
    ),
    "json-test-suite": (
        "expert-json/test-suite/draft2020-12.jsonl",
        {"prompt": "{schema:json}", "completion": "{data:json}", "where": {"valid": True}},
        1233, {"integer_over_64_bits": 6, "nul_character": 7}, {},
    ),
    "text2cypher": (
        "expert-neo4j/records.jsonl",
        {"prompt": "{question}", "completion": "{cypher}",
         "checks": (FieldCheck(field="cypher", check="cypher"),)},
        300, {}, {"cypher_unparsable": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_becomes_documents(family: str, shared_data: Path, tmp_path: Path) -> None:
    name, source, n_records, rejected, filtered = FAMILIES[family]
    raw, path = shared_data / name, tmp_path / "records.jsonl"
    if family == "text2cypher":
        # The parser takes 20 ms a query, so the first of its 4,500 records have to do.
        path.write_bytes(b"".join(raw.read_bytes().splitlines(keepends=True)[:n_records]))
    else:
        path.symlink_to(raw)
    record = prepare(path, replace(SPEC, source=SourceSpec(name="s", kind="local", **source)))
    assert record.n_rejected_by_reason == rejected
    assert record.n_filtered_by_reason == filtered
    assert record.n_records == n_records
    assert record.n_documents == n_records - sum(rejected.values()) - sum(filtered.values())


def as_calls(truth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take the first of the accepted values of every argument that has one."""
    return [
        {"function": {"name": name, "arguments": {k: v[0] for k, v in arguments.items() if v}}}
        for call in truth
        for name, arguments in call.items()
    ]


@pytest.mark.parametrize("name", ["simple_python", "multiple", "parallel", "live_simple"])
def test_function_calls_become_documents(name: str, shared_data: Path, tmp_path: Path) -> None:
    raw = read_json_lines(shared_data / "chat-tools" / "bfcl" / f"{name}.jsonl")
    chats = []
    for record in raw:
        calls = {"role": "assistant", "tool_calls": as_calls(record["ground_truth"])}
        turns = [*record["question"][0], calls]
        chats.append({"messages": turns, "tools": record["function"]})
    source = SourceSpec(name="s", kind="local", messages="messages", tools="tools")
    shard = prepare(write(tmp_path / "calls.jsonl", *chats), replace(SPEC, source=source))
    assert (shard.n_documents, shard.n_rejected_by_reason) == (len(raw), {})
