"""What pins a source, here or in a bundle, how it is sharded, and what generators make."""

import importlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import canonical_json, read_json_lines, sha256_file
from expertflow.core.hashes import HashCache
from expertflow.core.records import from_json, to_json
from expertflow.data.lock import lock_sources, write_lock
from expertflow.data.records import DataFile, DatasetSource, ExpertLock, SourceRecord
from expertflow.data.settings import FetchSpec, SourceSpec
from expertflow.data.shards import find_datasets, shard_names, token_shards
from expertflow.data.sources import local
from expertflow.data.sources.registry import fetch_source


def lock(folder: Path, *sources: SourceSpec, bundled: ExpertLock | None = None) -> ExpertLock:
    cache = HashCache(folder / "hashes.json")
    digest = "code {}".format
    result = lock_sources("e", sources, hashes=cache, generator_digest=digest, bundled=bundled)
    cache.save()
    return result


def local_source(path: object) -> SourceSpec:
    return SourceSpec(name="s", kind="local", path=str(path), text="{x}")


def test_a_lock_changes_with_content_and_not_with_time(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("{}\n")
    source = local_source(data)
    first = lock(tmp_path, source)
    assert write_lock(tmp_path / "lock.json", first)
    os.utime(data, (1, 1))
    assert lock(tmp_path, source) == first
    assert not write_lock(tmp_path / "lock.json", lock(tmp_path, source))
    (tmp_path / "hashes.json").write_text("{")
    assert lock(tmp_path, source) == first
    data.write_text("{ }\n")
    assert lock(tmp_path, source) != first


def test_globs_list_files_in_a_fixed_order(tmp_path: Path) -> None:
    names = ["a#.jsonl", "b c[1].jsonl", "x/y.jsonl/z.jsonl", "ü.jsonl"]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
        # An existing path is not a pattern.
        assert local.find_files(str(tmp_path / name)) == [tmp_path / name]
    for pattern, wanted in (("*.jsonl", [names[0], names[1], names[3]]), ("**/*.jsonl", names)):
        found = local.find_files(str(tmp_path / pattern))
        assert [path.relative_to(tmp_path).as_posix() for path in found] == wanted


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    for there in ("x.xls", "x.parquet.gz", "e.jsonl"):
        (tmp_path / there).write_text("x" * (there[0] == "x"))
    (tmp_path / "d.jsonl").mkdir()
    # As ``save_to_disk`` of datasets leaves it.
    (tmp_path / "saved" / "train").mkdir(parents=True)
    for name in ("dataset_dict.json", "train/data.arrow", "train/state.json"):
        (tmp_path / "saved" / name).write_text("x" * (9 if name.endswith("arrow") else 1))
    os.mkfifo(tmp_path / "p.jsonl")
    for name, message in (
        ("none.jsonl", "source s: no file at .*none.jsonl; correct the source's path"),
        ("x.xls", "is not one of .jsonl, .ndjson, .json, .csv, .*texts also with .gz or .zst"),
        ("x.parquet.gz", "is not one of"),
        ("e.jsonl", "e.jsonl is empty or not a regular file; fill it"),
        ("p.jsonl", "p.jsonl is empty or not a regular file"),
        ("d.jsonl", "is a directory; specify its files, e.g. .*d.jsonl/\\*.jsonl"),
        ("saved", "e.g. .*saved/train/\\*.arrow"),
    ):
        with pytest.raises(DataError, match=message):
            lock(tmp_path, local_source(tmp_path / name))
    with pytest.raises(DataError, match=r"in WSL it is /mnt/c/d/x\.jsonl"):
        local.find_files("C:\\d\\x.jsonl")


def test_an_impossible_source_is_rejected_before_anything_is_read(tmp_path: Path) -> None:
    poems = {"kind": "generated", "generator": "poems", "n_documents": 9}
    for settings, message in (
        ({"kind": "local", "options": {"encodng": 1}}, "source s: options.encodng: unknown"),
        (poems, "no generator 'poems'; use one of arithmetic, facts"),
    ):
        with pytest.raises(ConfigError, match=message):
            lock(tmp_path, SourceSpec(**{"name": "s", "path": "x", "text": "{x}", **settings}))


def test_a_file_that_changed_since_the_lock_is_rejected(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("{}\n")
    spec = FetchSpec(source=local_source(data), preset="demo")
    pinned = lock(tmp_path, spec.source)
    assert fetch_source(spec, pinned, tmp_path / "out").files[0].n_bytes == 3
    data.write_text("{  }\n")
    with pytest.raises(DataError, match="changed since the workflow started"):
        fetch_source(spec, pinned, tmp_path / "out")


def test_a_bundles_lock_replaces_missing_data(tmp_path: Path) -> None:
    source = local_source(tmp_path / "*.jsonl")
    (tmp_path / "d.jsonl").write_text("{}\n")
    made = lock(tmp_path, source)
    # The same data may be elsewhere.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "d.jsonl").rename(elsewhere / "d.jsonl")
    moved = replace(source, path=str(elsewhere / "*.jsonl"))
    assert lock(tmp_path, moved, bundled=made) == lock(tmp_path, source, bundled=made) == made
    more = lock(tmp_path, replace(moved, n_shards=3), bundled=made)
    assert more.sources == (replace(made.sources[0], n_shards=3),)
    with pytest.raises(DataError, match="no file at"):
        lock(tmp_path, source)
    # Dangling links are not data.
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "gone")
    for named in (source, local_source(tmp_path / "d.jsonl")):
        assert lock(tmp_path, named, bundled=made) == made


def commit(repository: Path, text: str) -> None:
    repository.mkdir()
    (repository / "file").write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "file"], [*who, "commit", "-q", "-m", text]):
        subprocess.run(["git", "-C", str(repository), *words], check=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_bundles_lock_replaces_no_other_repository(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    source = SourceSpec(name="s", kind="git", path=str(repository), text="{x}")
    commit(repository, "one")
    made = lock(tmp_path, source)
    repository.rename(tmp_path / "moved")
    moved = replace(source, path=str(tmp_path / "moved"))
    assert lock(tmp_path, source, bundled=made) == lock(tmp_path, moved, bundled=made) == made
    other = replace(moved, options={"ref": "HEAD"})
    assert lock(tmp_path, other, bundled=made) == lock(tmp_path, other) != made
    commit(repository, "two")
    with pytest.raises(DataError, match="repository differs from the data in e's bundle"):
        lock(tmp_path, source, bundled=made)


def test_a_bundled_generator_keeps_its_order_and_a_changed_one_differs(tmp_path: Path) -> None:
    settings = {"name": "s", "kind": "generated", "generator": "text_to_sql", "text": "{x}"}
    source = SourceSpec(**settings, n_documents=4, seed=1)
    made, path = lock(tmp_path, source), tmp_path / "sources.lock.json"
    assert write_lock(path, made)
    bundled = from_json(ExpertLock, json.loads(canonical_json(to_json(made))))
    assert list(bundled.sources[0].identity) != list(made.sources[0].identity)
    assert not write_lock(path, lock(tmp_path, source, bundled=bundled))
    more = replace(source, n_documents=8)
    assert lock(tmp_path, more, bundled=made) == lock(tmp_path, more) != made


@pytest.mark.parametrize("n_shards", [1, 2, 15, 16, 17, 200])
def test_token_shards_are_runs_of_document_shards(n_shards: int) -> None:
    runs = token_shards(n_shards)
    assert [name for run in runs.values() for name in run] == shard_names(n_shards)
    sizes = [len(run) for run in runs.values()]
    assert max(sizes) <= 16 and max(sizes) - min(sizes) <= 1
    assert list(runs) == shard_names(len(runs))


def data_file(path: Path, *, n_records: int | None = 2, notes: tuple[str, ...] = ()) -> DataFile:
    path.write_text("{}\n")
    return DataFile(
        path=str(path), format="jsonl", compression=None, n_bytes=3, n_records=n_records,
        sha256=path.name, notes=notes,
    )  # fmt: skip


def find(*files: DataFile, stated: str | None = "MIT") -> DatasetSource:
    record = SourceRecord(
        name="s", preset="demo", kind="hub", revision="c", card_license="mit", n_shards=3,
        files=files, artifacts={},
    )  # fmt: skip
    manifest = find_datasets(expert="e", preset="demo", licenses={"s": stated}, sources=[record])
    return manifest.sources[0]


def test_files_of_a_source_add_up_and_their_notes_are_gathered(tmp_path: Path) -> None:
    a = data_file(tmp_path / "a", notes=("zstd", "odd"))
    b = data_file(tmp_path / "b", notes=("odd",))
    source = find(a, b)
    assert (source.n_files, source.n_bytes, source.n_records) == (2, 6, 4)
    assert source.notes == ("odd", "zstd")
    assert source.sha256 != find(b, a).sha256
    assert find(a, data_file(tmp_path / "c", n_records=None)).n_records is None
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match="a: missing from source s; fetch it again"):
        find(a)


def test_the_manifests_license_takes_precedence_and_the_card_is_noted(tmp_path: Path) -> None:
    for stated, license, notes in (
        ("MIT", "MIT", ()),
        (None, "mit", ("license mit: from the data set card",)),
        ("CC0-1.0", "CC0-1.0", ("the data set card says mit",)),
    ):
        source = find(data_file(tmp_path / "a"), stated=stated)
        assert (source.license, source.notes) == (license, notes)


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
N_DOCUMENTS = {"facts": 25, "git_repository": 40, "json_schema": 80}


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


def test_requesting_too_many_records_names_the_maximum(tmp_path: Path) -> None:
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


def test_json_is_valid_and_the_schema_is_strict(tmp_path: Path) -> None:
    records, _ = make("json_schema", tmp_path)
    for record in records:
        schema, value = json.loads(record["schema"]), json.loads(record["json"])
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid(value) and not validator.is_valid({**value, "unknown": 1})


def test_arithmetic_steps_are_right_and_end_in_the_answer(tmp_path: Path) -> None:
    records, _ = make("arithmetic", tmp_path)
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for record in records:
        *steps, last = record["answer"].split("\n")
        for step in steps:
            left, sign, right, result = re.fullmatch(r"(\d+) (.) (\d+) = (\d+)", step).groups()  # type: ignore[union-attr]
            assert apply[sign](int(left), int(right)) == int(result)
        assert last == f"#### {result}" == f"#### {record['final']}"
