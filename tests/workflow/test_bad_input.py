"""What a user gets wrong ends in one line that names it and the way out, and leaves no result."""

from pathlib import Path

import pytest
from workflow_space import REPORT, Workspace, make_workspace, manifest

pytestmark = pytest.mark.chain


@pytest.fixture
def fresh(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "space")


def test_a_source_that_cannot_be_used(fresh: Workspace) -> None:
    rejected = "source sums: 5 of 5 records rejected: missing_field 5; first: data/sums.jsonl"
    for text, said in (
        ("", "data/sums.jsonl is empty"),
        ('{"question": "x", "answer": "y"}\n', "1 documents are too few to hold one out"),
        ('{"q": "x"}\n' * 5, rejected),
    ):
        (fresh.root / "data" / "sums.jsonl").write_text(text)
        assert said in fresh.refused()
        assert not (fresh.root / REPORT).exists()
    rejects = fresh.root / "results" / "tiny" / "documents" / "sums" / "000.rejected.jsonl"
    assert len(rejects.read_text().splitlines()) == 5


def test_what_cannot_be_downloaded(fresh: Workspace) -> None:
    value = {**manifest(), "model": "nobody/nothing"}
    value["sources"][0] |= {"name": "h", "kind": "hub", "id": "nobody/nothing"}
    del value["sources"][0]["path"]
    fresh.write_manifest("other", {**manifest(), "model": "nobody/nothing"})
    fresh.write_manifest("tiny", value)
    line = fresh.refused("results/other/model.json", HF_HUB_OFFLINE="1")
    assert "model is 'nobody/nothing': neither a folder here nor in the cache" in line
    line = fresh.refused("results/tiny/datasets.json", HF_HUB_OFFLINE="1")
    assert "error: source h: data set nobody/nothing" in line


def test_auto_is_the_cpu_where_there_is_no_card(finished: Workspace, tmp_path: Path) -> None:
    space = finished.copy(tmp_path / "copy")
    arguments = ("results/tiny/plan.json", "--config", "hardware=auto")
    space.run(*arguments, CUDA_VISIBLE_DEVICES="")
    assert space.record("plan.json")["hardware"] == "cpu"
    space.run(*arguments[:-1], "hardware=H100 SXM")
    assert space.record("plan.json")["hardware"] == "H100 SXM"


def test_what_must_not_run_is_refused_before_any_job(fresh: Workspace) -> None:
    unknown = fresh.refused("results/tinny/report.json")
    assert "no manifest for expert 'tinny'" in unknown and "did you mean 'tiny'?" in unknown
    kept = fresh.refused(REPORT, "--keep-incomplete")
    assert "--keep-incomplete would record half-written outputs" in kept
    for arguments in (("--workflow-profile", "none"), ("--resources", "gpu=0")):
        unlimited = fresh.refused(REPORT, *arguments)
        assert "resource gpu" in unlimited and "--resources gpu=1" in unlimited
    assert not list(fresh.root.glob("results/*/sources/fetched"))
