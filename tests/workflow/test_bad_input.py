"""What a user gets wrong ends in one line that names it and the way out, and leaves no result."""

from pathlib import Path

import pytest
import yaml
from support import ROOT
from workflow_space import Workspace, make_workspace, manifest

pytestmark = pytest.mark.chain


@pytest.fixture
def fresh(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "space")


def last_line(space: Workspace, *arguments: str) -> str:
    """Run, expect failure, and give the error's line."""
    done = space.snakemake(*(arguments or ("results/tiny/report.json",)))
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (space.root / "results" / "tiny" / "report.json").exists()
    return lines[0]


def test_an_unknown_expert(fresh: Workspace) -> None:
    line = last_line(fresh, "results/tinny/report.json")
    assert "no manifest for expert 'tinny'" in line and "did you mean 'tiny'?" in line


def test_a_misspelt_setting(fresh: Workspace) -> None:
    fresh.write_manifest("tiny", manifest(learning_rat=1.0))
    assert "did you mean 'learning_rate'" in last_line(fresh)


def test_a_source_that_is_not_there(fresh: Workspace) -> None:
    (fresh.root / "data" / "sums.jsonl").unlink()
    assert "source sums: no file at data/sums.jsonl; correct the source's path" in last_line(fresh)


def test_an_empty_source(fresh: Workspace) -> None:
    (fresh.root / "data" / "sums.jsonl").write_text("")
    assert "data/sums.jsonl is empty" in last_line(fresh)


def test_a_source_without_a_usable_record(fresh: Workspace) -> None:
    (fresh.root / "data" / "sums.jsonl").write_text('{"q": "x"}\n' * 5)
    line = last_line(fresh)
    assert "source sums: 5 of 5 records rejected: missing_field 5; first: data/sums.jsonl" in line
    rejects = fresh.root / "results" / "tiny" / "documents" / "sums" / "000.rejected.jsonl"
    assert len(rejects.read_text().splitlines()) == 5


def test_one_record_cannot_be_split(fresh: Workspace) -> None:
    (fresh.root / "data" / "sums.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    assert "1 documents are too few to hold one out" in last_line(fresh)


def test_a_model_directory_that_holds_no_model(fresh: Workspace) -> None:
    (fresh.root / "empty").mkdir()
    fresh.write_manifest("tiny", {**manifest(), "model": "empty"})
    assert "empty: no config.json" in last_line(fresh)


def test_a_model_that_is_nowhere(fresh: Workspace) -> None:
    fresh.write_manifest("tiny", {**manifest(), "model": "nobody/nothing"})
    done = fresh.snakemake("results/tiny/model.json", HF_HUB_OFFLINE="1")
    assert done.returncode != 0
    assert "error: model nobody/nothing: neither a directory" in done.stderr


def test_a_data_set_that_cannot_be_had(fresh: Workspace) -> None:
    value = manifest()
    value["sources"][0] |= {"name": "h", "kind": "hub", "id": "nobody/nothing"}
    del value["sources"][0]["path"]
    fresh.write_manifest("tiny", value)
    done = fresh.snakemake("results/tiny/datasets.json", HF_HUB_OFFLINE="1")
    assert done.returncode != 0
    assert "error: source h: data set nobody/nothing" in done.stderr


def test_the_full_preset_needs_a_card_or_its_name(finished: Workspace, tmp_path: Path) -> None:
    space = finished.copy(tmp_path / "copy")
    arguments = ("results/tiny/plan.json", "--config", "preset=full", "allow_preset_change=true")
    done = space.snakemake(*arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert "this machine has no NVIDIA GPU (" in done.stderr
    assert "plan for a card by name" in done.stderr
    done = space.snakemake(*arguments, "hardware=H100 SXM")
    assert done.returncode == 0, done.stderr[-2000:]


def test_keep_incomplete_is_refused(fresh: Workspace) -> None:
    line = last_line(fresh, "results/tiny/report.json", "--keep-incomplete")
    assert "--keep-incomplete would record half-written outputs" in line


@pytest.mark.parametrize(
    "arguments", [("--workflow-profile", "none"), ("--resources", "gpu=0")], ids=["none", "zero"]
)
def test_any_number_of_trainings_at_once_is_refused(
    fresh: Workspace, arguments: tuple[str, ...]
) -> None:
    line = last_line(fresh, "results/tiny/report.json", *arguments)
    assert "resource gpu" in line and "--resources gpu=1" in line


def test_the_workflow_runs_from_outside_with_ones_own_config(tmp_path: Path) -> None:
    mine = Workspace(tmp_path)
    (tmp_path / "config" / "experts").mkdir(parents=True)
    mine.write_records()
    mine.write_side_files()
    mine.write_manifest("tiny", manifest())
    (tmp_path / "config" / "config.yaml").write_text(yaml.safe_dump({"experts": {"tiny": {}}}))
    done = mine.snakemake("-s", str(ROOT / "Snakefile"), "results/tiny/packing.json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "results" / "tiny" / "packing.json").is_file()
