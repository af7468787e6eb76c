"""The chain on real questions, real tables and a real tokenizer, by the documented example."""

import json
from pathlib import Path

import pytest
import yaml
from support import ROOT
from workflow_space import Workspace

pytestmark = pytest.mark.chain


def test_wikisql_runs_from_files_to_a_receipt(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "config" / "experts").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    example = ROOT / "docs" / "examples" / "wikisql.yaml"
    manifest = yaml.safe_load(example.read_text())
    # The second source is made by a bench, as is the small tokenizer; here the real one is used.
    manifest["sources"] = manifest["sources"][:1]
    (tmp_path / "config" / "experts" / "wikisql.yaml").write_text(yaml.safe_dump(manifest))
    (tmp_path / "data" / "wikisql").symlink_to(shared_data / "expert-sql" / "wikisql")
    (tmp_path / "data" / "tokenizer").symlink_to(shared_data / "tokenizers" / "qwen")
    short = {"training": {"max_steps": 12, "eval_steps": 12, "batch_size": 2}}
    short |= {"data": {"eval_fraction": 0.004}, "evaluation": {"max_examples": 6}}
    config = {"experts": {"wikisql": short}}
    (tmp_path / "config" / "config.yaml").write_text(yaml.safe_dump(config))
    Workspace(tmp_path).run("-s", str(ROOT / "Snakefile"), "results/wikisql/report.json")
    report = json.loads((tmp_path / "results/wikisql/report.json").read_text())
    packing = json.loads((tmp_path / "results/wikisql/packing.json").read_text())
    before, after = (report["evaluation"][side] for side in ("before", "after"))
    assert report["data"]["records"] == 6990
    assert packing["tokenizer_sha256"]
    assert packing["train"]["n_tokens"] > 500_000
    assert after["held_out_loss"] < before["held_out_loss"]
    assert after["n_examples"] == 6
    assert report["evaluation"]["documents_shared_with_training"] == 0
