"""Tuning in the workflow: its inputs and its dependents."""

import json
from pathlib import Path

import pytest
from bundle_boxes import GPU_WORK, make_box, make_bundle
from workflow_space import REPORT, Workspace, manifest

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan

pytestmark = [pytest.mark.chain, pytest.mark.long]
FILE, PLAN = "results/tiny/tuning.json", "results/tiny/plan.json"
FREE = {"batch_size": "auto", "n_threads": "auto"}
AFTER = {"plan_training"} | GPU_WORK


@pytest.fixture(scope="module")
def tuned(finished: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a space with a real tuning, of the default alone, and a plan based on it."""
    space = finished.copy(tmp_path_factory.mktemp("tuned") / "space")
    limited = 'wf.command("tune_expert", "--max-seconds 0 2> {log:q}", on_card=True)'
    space.edit("workflow/rules/tune.smk", 'wf.command("tune_expert", on_card=True)', limited)
    space.write_manifest("tiny", manifest(**FREE, tuned=FILE))
    space.run(PLAN)
    return space


@pytest.fixture
def copy(tuned: Workspace, tmp_path: Path) -> Workspace:
    return tuned.copy(tmp_path / "copy")


def test_a_manifest_that_uses_it_makes_it_before_the_plan(space: Workspace) -> None:
    space.write_manifest("tiny", manifest(tuned=FILE))
    calibrated = (REPORT, "--config", "calibrate=true")
    assert set(space.jobs(*calibrated)) == {"tune_expert", "calibrate_expert"} | AFTER
    output = space.run("-n", *calibrated, "--logger-expertflow-snakemake")
    assert output.count(f"--tuning {FILE}") == 2, "the plan and its calibration"
    # On its own it reads no plan.
    (space.root / PLAN).unlink()
    assert space.jobs(FILE) == {"tune_expert": 1}


def test_the_plan_contains_the_tuned_settings(tuned: Workspace) -> None:
    plan = read_record(TrainPlan, tuned.root / "results/tiny/plan.json")
    found = json.loads((tuned.root / FILE).read_text())
    assert plan.batch_size == found["best"]["batch_size"]
    assert plan.n_threads == found["best"]["n_threads"]
    because = {reason.setting: reason.because for reason in plan.reasons}
    assert because["gradient_accumulation_steps"].startswith("tuned: ")
    assert not tuned.jobs(PLAN)


def test_an_edited_tuning_plans_again(copy: Workspace) -> None:
    found = json.loads((copy.root / FILE).read_text())
    (copy.root / "config" / "mine.json").write_text(json.dumps(found))
    copy.write_manifest("tiny", manifest(**FREE, tuned="config/mine.json"))
    copy.run(PLAN)
    found["best"]["n_threads"] = 2 if found["best"]["n_threads"] == 1 else 1
    (copy.root / "config" / "mine.json").write_text(json.dumps(found))
    assert copy.planned() == AFTER


def test_a_learning_rate_does_not_tune_again_and_a_row_length_does(copy: Workspace) -> None:
    copy.write_manifest("tiny", manifest(**FREE, tuned=FILE, learning_rate=2e-3, max_steps=5))
    assert copy.planned() == AFTER
    copy.write_manifest("tiny", manifest(**FREE, tuned=FILE, max_seq_length=48))
    assert "tune_expert" in copy.planned()


@pytest.mark.parametrize("place", [FILE, "config/mine.json"])
def test_a_bundle_includes_the_tuning(copy: Workspace, tmp_path: Path, place: str) -> None:
    if place != FILE:
        (copy.root / place).write_text((copy.root / FILE).read_text())
        copy.write_manifest("tiny", manifest(**FREE, tuned=place))
    bundle = make_bundle(copy)
    box = make_box(tmp_path / "box", copy)
    (box.root / place).unlink(missing_ok=True)
    box.open(bundle)
    assert box.planned() == GPU_WORK
    override = "experts={tiny: {training: {learning_rate: 3e-6}}}"
    if place == FILE:
        assert box.planned("--config", override) == AFTER
