"""Whole runs: real data, Snakemake's own report, a job that is a Snakemake of its own."""

import json
import zipfile
from pathlib import Path

import pytest
import yaml
from support import ROOT
from workflow_space import Workspace, make_workspace

pytestmark = [pytest.mark.chain, pytest.mark.long]


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


def test_the_page_is_inside(space: Workspace, tmp_path: Path) -> None:
    target = tmp_path / "report.zip"
    # A proxy that is not there: any attempt to fetch something would fail.
    no_network = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    space.run("--report", str(target), "results/tiny/report.json", **no_network)
    page = (space.root / "results" / "tiny" / "report.html").read_bytes()
    with zipfile.ZipFile(target) as archive:
        inside = [name for name in archive.namelist() if archive.read(name) == page]
        index = next(n for n in archive.namelist() if n.endswith("report.html") and n not in inside)
        text = archive.read(index).decode()
    assert len(inside) == 1, "the receipt is not in Snakemake's report"
    assert "The receipt of expert tiny" in text


@pytest.mark.parametrize(("mode", "n_retries"), [("default", 1), ("remote", 0)])
def test_only_the_submitting_snakemake_retries(tmp_path: Path, mode: str, n_retries: int) -> None:
    space = make_workspace(tmp_path)
    bundle = space.root / "results" / "tiny" / "bundle.tar"
    bundle.parent.mkdir(parents=True)
    bundle.write_text("no tar")
    snakefile = ("-s", "workflow/remote.smk", "--mode", mode)
    done = space.snakemake(*snakefile, "--config", "retries=1", "--", "results/tiny/outcome.tar")
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "Error in rule train_bundle" in said
    assert said.count("Trying to restart job") == n_retries
