"""Every generator: equal bytes for equal arguments, unique records, and records that are right."""

import importlib
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from expertflow.core.errors import DataError
from expertflow.core.files import read_json_lines, sha256_file

FIELDS = {
    "text_to_sql": ("question", "schema", "sql", "database"),
    "text_to_cypher": ("question", "schema", "cypher"),
    "typescript": ("prompt", "completion"),
    "json_schema": ("instruction", "schema", "json"),
    "arithmetic": ("question", "answer", "final"),
    "instructions": ("instruction", "response"),
    "facts": ("question", "answer"),
    "git_repository": ("commit", "message", "diff"),
}
N_DOCUMENTS = {"facts": 25, "git_repository": 90, "json_schema": 150}


def make(
    name: str, directory: Path, *, seed: int = 3
) -> tuple[list[dict[str, Any]], dict[str, Path]]:
    if name == "git_repository" and shutil.which("git") is None:
        pytest.skip("git is not installed")
    module = importlib.import_module(f"expertflow.data.sources.generated.{name}")
    n_documents = N_DOCUMENTS.get(name, 400)
    artifacts = module.generate(n_documents=n_documents, seed=seed, directory=directory)
    records = read_json_lines(directory / "records.jsonl")
    assert len(records) == n_documents
    return records, artifacts


@pytest.mark.parametrize("name", FIELDS)
def test_records_are_deterministic_unique_and_complete(name: str, tmp_path: Path) -> None:
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    records, artifacts = make(name, first)
    make(name, second)
    make(name, other, seed=4)
    for path in (first / "records.jsonl", *filter(Path.is_file, artifacts.values())):
        assert sha256_file(path) == sha256_file(second / path.name)
    assert sha256_file(first / "records.jsonl") != sha256_file(other / "records.jsonl")
    for field in ("id", FIELDS[name][0]):
        assert len({record[field] for record in records}) == len(records)
    for record in records:
        assert all(isinstance(record[field], str) and record[field] for field in FIELDS[name])


def test_asking_for_more_than_there_is_names_the_most(tmp_path: Path) -> None:
    from expertflow.data.sources.generated import facts

    with pytest.raises(DataError, match=f"at most {len(facts.FACTS)}"):
        facts.generate(n_documents=1000, seed=0, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_sql_answers_run_and_are_mostly_not_empty(tmp_path: Path) -> None:
    records, artifacts = make("text_to_sql", tmp_path)
    connection = sqlite3.connect(f"file:{artifacts['database']}?mode=ro", uri=True)
    answers = [connection.execute(record["sql"]).fetchall() for record in records]
    assert sum(map(bool, answers)) / len(answers) > 0.9
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    tables = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}
    seen = {ddl for record in records for ddl in record["schema"].split("; ")}
    assert seen == tables


def test_json_validates_and_the_schema_is_strict(tmp_path: Path) -> None:
    records, _ = make("json_schema", tmp_path)
    for record in records:
        schema, value = json.loads(record["schema"]), json.loads(record["json"])
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(value, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**value, "unknown": 1}, schema)


def test_arithmetic_steps_are_right_and_end_in_the_answer(tmp_path: Path) -> None:
    records, _ = make("arithmetic", tmp_path)
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for record in records:
        *steps, last = record["answer"].split("\n")
        for step in steps:
            left, sign, right, result = re.fullmatch(r"(\d+) (.) (\d+) = (\d+)", step).groups()  # type: ignore[union-attr]
            assert apply[sign](int(left), int(right)) == int(result)
        assert last == f"#### {result}" == f"#### {record['final']}"
