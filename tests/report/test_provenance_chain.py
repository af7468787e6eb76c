"""The chain of stages, read from the sidecars of their records."""

import os
from pathlib import Path
from typing import Any

import pytest

from expertflow.config import guard
from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file, sha256_json, sidecar_of
from expertflow.core.records import write_record
from expertflow.core.sidecars import write_sidecar
from expertflow.data.records import DatasetManifest, DatasetSource
from expertflow.report.provenance import collect_provenance, list_stages
from expertflow.report.records import ChainLink


def _record(path: Path, rule: str, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"from": "{path.name}"}}', encoding="utf-8")
    write_sidecar(path, spec="{}", code=code, rule=rule)


def _name_shards(results: Path, *sources: str) -> None:
    """Write datasets.json with one shard per source."""
    blank: dict[str, Any] = {"kind": "local", "revision": None, "license": None, "sha256": ""}
    counts = dict.fromkeys(("n_files", "n_bytes", "n_records", "n_shards"), 1)
    rows = tuple(DatasetSource(name=name, notes=(), **counts, **blank) for name in sources)
    value = DatasetManifest(expert="e", preset="full", sources=rows)
    write_record(results / "datasets.json", value)


def test_stages_are_in_the_chains_order(tmp_path: Path) -> None:
    for name, rule in (
        ("training", "train_expert"), ("packing", "pack_sequences"),
        ("sources/fetched/a", "fetch_source"), ("calibration", "calibrate_expert"),
    ):  # fmt: skip
        _record(tmp_path / f"{name}.json", rule, "its code")
    _name_shards(tmp_path, "a")
    (tmp_path / "plan.json").write_text("{}")  # made by hand: no sidecar, no stage
    chain = list_stages(tmp_path, asked=["calibrate"])
    names = ["fetch_source", "pack_sequences", "calibrate_expert", "train_expert"]
    assert [entry.stage for entry in chain] == names
    assert chain[0].record == "sources/fetched/a.json"
    last = {"stage": "train_expert", "record": "training.json", "code": "its code"}
    assert chain[3] == ChainLink(sha256=sha256_file(tmp_path / "training.json"), **last)
    sidecar_of(tmp_path / "training.json").write_text("{")
    with pytest.raises(DataError, match=r"\.training\.json\.fingerprint"):
        list_stages(tmp_path)


def test_shards_of_one_code_are_one_entry(tmp_path: Path) -> None:
    paths = [tmp_path / "documents" / source / "000.json" for source in "ab"]
    for path in paths:
        _record(path, "prepare_shard", "same")
    _name_shards(tmp_path, "a", "b")
    (entry,) = list_stages(tmp_path)
    assert entry.record == "documents/*/*.json (2)"
    hashes = {path.relative_to(tmp_path).as_posix(): sha256_file(path) for path in paths}
    assert entry.sha256 == sha256_json(hashes)
    _record(paths[1], "prepare_shard", "other")
    assert [entry.code for entry in list_stages(tmp_path)] == ["other", "same"]
    # Leftovers of earlier runs are not stages.
    for name in ("a", "gone"):
        _record(tmp_path / f"sources/fetched/{name}.json", "fetch_source", "f")
    _record(tmp_path / "documents/a/001.json", "prepare_shard", "left")
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
