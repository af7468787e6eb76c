"""The README's formats for your own data work at the first try."""

import json
import re
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest
from support import ROOT
from workflow_space import Workspace, make_workspace, readme_manifest

N = 12


def repeat(record: str) -> str:
    """Return records like the one shown, each with its own question."""
    return "".join(record.strip().replace("France", f"France ({i})") + "\n" for i in range(N))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = make_workspace(tmp_path_factory.mktemp("own") / "clone")
    data = space.root / "data"
    text = (ROOT / "README.md").read_text()
    found = re.search(r"with its fields; run again\.[^\n]*\n\n   ```\n(.*?)   ```", text, re.DOTALL)
    assert found
    shown = [re.sub("^   ", "", part, flags=re.MULTILINE) for part in found[1].split("\n\n")]
    lines, table, chats = shown
    header, row = table.strip().splitlines()
    (data / "lines.jsonl").write_text(repeat(lines))
    (data / "table.csv").write_text(f"{header}\n{repeat(row)}")
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(data / "table.csv"), data / "parquet.parquet")
    (data / "chats.jsonl").write_text(repeat(chats))
    for path in (data / name for name in ("lines.jsonl", "table.csv", "parquet.parquet")):
        write_manifest(space, path)
    write_manifest(space, data / "chats.jsonl", messages="messages")
    forms = ("lines", "chats", "table", "parquet")
    space.run(*(f"results/{name}/packing.json" for name in forms))
    return space


def write_manifest(space: Workspace, path: Path, messages: str | None = None) -> None:
    text = readme_manifest().replace("data/quickstart.jsonl", f"data/{path.name}")
    if messages:
        text = re.sub(r"    (prompt|completion):.*\n", "", text)
        text = text.replace("    license:", f"    messages: {messages}\n    license:")
    (space.root / "config" / "experts" / f"{path.stem}.yaml").write_text(text)


@pytest.mark.chain
@pytest.mark.long
def test_the_forms_of_the_readme_become_rows(made: Workspace) -> None:
    results = made.root / "results"
    for name in ("lines", "chats"):
        documents = json.loads((results / name / "documents.json").read_text())
        assert [documents[key] for key in ("n_records", "n_rejected", "n_dropped")] == [N, 0, 0]
        packing = json.loads((results / name / "packing.json").read_text())
        assert [packing[key]["n_documents"] for key in ("train", "held_out")] == [N - 2, 2]
    # With the same rows, all later jobs are the same.
    rows = {
        path.relative_to(results / "lines"): path.read_bytes()
        for path in (results / "lines" / "packed").rglob("*.arrow")
    }
    assert rows
    for name in ("table", "parquet"):
        assert {path: (results / name / path).read_bytes() for path in rows} == rows


def test_the_quickstart_matches_the_readme() -> None:
    lines = (ROOT / "data" / "quickstart.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["question"] for record in records}) == len(records) == 300
    assert {tuple(record) for record in records} == {("question", "answer")}
    shown = re.search(r'`({"question": "It is too.*?})`', (ROOT / "README.md").read_text())
    assert shown and json.loads(shown[1]) in records
