"""The README's data of one's own work at the first try, in each form that it shows."""

import json
import re
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest
import yaml
from support import ROOT
from workflow_space import REPORT, make_workspace, readme_manifest

# Records of a form: too few for a verdict.
N = 6


def shown_records() -> list[str]:
    """Return the texts of the README's three files: questions, a table, chats."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"with its fields; run again\.[^\n]*\n\n   ```\n(.*?)   ```", text, re.DOTALL)
    assert found
    return [re.sub("^   ", "", part, flags=re.MULTILINE) for part in found[1].split("\n\n")]


def repeat(record: str, name: str) -> str:
    """Return records like the one that is shown, each with a question of its own."""
    lines = (record.strip().replace("France", f"France ({name} {i})") for i in range(N))
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.chain
@pytest.mark.long
def test_each_form_of_the_readme_becomes_documents_of_a_report(tmp_path: Path) -> None:
    """One expert learns of all four; test_commands.py trains the README's own file alone."""
    space = make_workspace(tmp_path / "clone")
    data = space.root / "data"
    lines, table, chats = shown_records()
    header, row = table.strip().splitlines()
    (data / "lines.jsonl").write_text(repeat(lines, "line"))
    (data / "table.csv").write_text(f"{header}\n{repeat(row, 'row')}")
    (data / "again.csv").write_text(f"{header}\n{repeat(row, 'parquet')}")
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(data / "again.csv"), data / "rows.parquet")
    (data / "chats.jsonl").write_text(repeat(chats, "chat"))

    value = yaml.safe_load(readme_manifest())
    value["training"]["num_train_epochs"] = 2
    [source] = value["sources"]
    names = ("lines.jsonl", "table.csv", "rows.parquet", "chats.jsonl")
    sources = [{**source, "name": name.partition(".")[0], "path": f"data/{name}"} for name in names]
    del sources[-1]["prompt"], sources[-1]["completion"]
    sources[-1]["messages"] = "messages"
    space.write_manifest("tiny", {**value, "sources": sources})
    space.run(REPORT)

    documents = space.record("documents.json")
    for found in documents["sources"]:
        counts = ("n_records", "n_rejected", "n_filtered", "n_dropped")
        assert [found[key] for key in counts] == [N, 0, 0, 0], found["source"]
    assert len(documents["sources"]) == len(names)
    report = space.record("report.json")
    assert report["evaluation"]["held_out_documents"] == 2
    assert report["verdict"]["answer"] == "Too few held-out documents for a verdict."


def test_the_quickstart_is_what_the_readme_says() -> None:
    lines = (ROOT / "data" / "quickstart.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["question"] for record in records}) == len(records) == 300
    assert {tuple(record) for record in records} == {("question", "answer")}
    shown = re.search(r'`({"question": "It is too.*?})`', (ROOT / "README.md").read_text())
    assert shown and json.loads(shown[1]) in records
