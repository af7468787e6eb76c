"""The chain of stages, read off the notes that lie beside their records."""

import os
from pathlib import Path

import pytest

from expertflow.config import guard
from expertflow.core import cli
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import write_record
from expertflow.data.records import DatasetManifest, DatasetSource
from expertflow.report.provenance import collect_provenance, list_stages
from expertflow.report.records import ChainLink


def _record(path: Path, rule: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"from": "{path.name}"}}', encoding="utf-8")
    monkeypatch.setattr("sys.argv", [f"{rule}.py"])
    cli.write_sidecar(path, spec="{}", code=code)


def _name_shards(results: Path, *sources: str) -> None:
    """Write datasets.json with one shard a source."""
    rows = (
        DatasetSource(
            name=source, kind="local", revision=None, license=None, n_files=1, n_bytes=1,
            n_records=1, n_shards=1, sha256="", notes=(),
        )
        for source in sources
    )  # fmt: skip
    value = DatasetManifest(expert="e", preset="full", sources=tuple(rows))
    write_record(results / "datasets.json", value)


def test_stages_are_in_the_chains_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _record(tmp_path / "training.json", "train_expert", "t", monkeypatch)
    _record(tmp_path / "packing.json", "pack_sequences", "p", monkeypatch)
    _record(tmp_path / "sources/fetched/a.json", "fetch_source", "f", monkeypatch)
    _record(tmp_path / "calibration.json", "calibrate_expert", "c", monkeypatch)
    _name_shards(tmp_path, "a")
    (tmp_path / "plan.json").write_text("{}")  # made by hand: no note, no stage
    chain = list_stages(tmp_path, asked=["calibrate"])
    names = ["fetch_source", "pack_sequences", "calibrate_expert", "train_expert"]
    assert [entry.stage for entry in chain] == names
    assert chain[0].record == "sources/fetched/a.json"
    sha256 = sha256_file(tmp_path / "training.json")
    assert chain[3] == ChainLink(
        stage="train_expert", record="training.json", sha256=sha256, code="t"
    )


def test_shards_of_one_code_are_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "documents" / source / "000.json" for source in "ab"]
    for path in paths:
        _record(path, "prepare_shard", "same", monkeypatch)
    _name_shards(tmp_path, "a", "b")
    (entry,) = list_stages(tmp_path)
    assert entry.record == "documents/*/*.json (2)"
    hashes = {path.relative_to(tmp_path).as_posix(): sha256_file(path) for path in paths}
    assert entry.sha256 == sha256_json(hashes)
    _record(paths[1], "prepare_shard", "other", monkeypatch)
    assert [entry.code for entry in list_stages(tmp_path)] == ["other", "same"]
    # What earlier runs left is no stage.
    for name in ("a", "gone"):
        _record(tmp_path / f"sources/fetched/{name}.json", "fetch_source", "f", monkeypatch)
    _record(tmp_path / "documents/a/001.json", "prepare_shard", "left", monkeypatch)
    _name_shards(tmp_path, "a")
    records = [entry.record for entry in list_stages(tmp_path)]
    assert records == ["sources/fetched/a.json", "documents/a/000.json"]


def test_the_command_is_the_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTFLOW_COMMAND", raising=False)
    assert collect_provenance(tmp_path)["command"] is None
    monkeypatch.setattr("sys.argv", ["/bin/snakemake", "--config", "hardware=H100 SXM"])
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("EXPERTFLOW", "")
    monkeypatch.setenv("EXPERTFLOW_COMMAND", "")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    guard.set_environment(tmp_path, main=True)
    monkeypatch.setattr("sys.argv", ["snakemake", "--mode", "subprocess"])
    guard.set_environment(tmp_path, main=False)
    command = collect_provenance(tmp_path)["command"]
    assert command == "snakemake --config 'hardware=H100 SXM'"
    assert os.environ["GOMP_SPINCOUNT"] == "5", "what the user set stays"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    guard.set_environment(tmp_path, main=False)
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
