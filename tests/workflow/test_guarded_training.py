"""A real training stopped by its budget ends with the same weights, here and on a fresh machine.

test_interruptions.py shows that these equal those of an uninterrupted training.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import SCRIPTS, patched_script
from workflow_space import LIMIT_S, SNAKEMAKE, Workspace, let_trainings_rest, manifest

pytestmark = [pytest.mark.chain, pytest.mark.long]
TARGET = "results/tiny/training.json"
N_STEPS = 40
# A budget that is spent once there is a checkpoint: a stop during training, however slow.
SPENT = """
from expertflow.rental.guard.ledger import Meter

usd = Meter.total_usd
has_saved = lambda: any(Path("state").glob("tiny/*/checkpoints/step-*[1-9]?"))
Meter.total_usd = lambda meter, **ahead: 99.0 if has_saved() else usd(meter, **ahead)
"""


def start(space: Workspace, program: Path, there: Path) -> "subprocess.Popen[str]":
    options = ["--usd-per-hour", "2.49", "--max-usd", "50", "--sync-to", there, "--disk-stays"]
    options += ["--on-finish", "echo $EXPERTFLOW_OUTCOME >> hooks"]
    return space.start(sys.executable, program, *options, "--", SNAKEMAKE, "--cores", "2", TARGET)


def end(process: "subprocess.Popen[str]", *, code: int) -> str:
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        # Its supervisor stops what it has started.
        process.kill()
    assert process.returncode == code, out[-6000:]
    return out


def test_a_budget_does_not_change_the_weights(finished: Workspace, tmp_path: Path) -> None:
    first = finished.copy(tmp_path / "first")
    let_trainings_rest(first)
    first.write_manifest("tiny", manifest(max_steps=N_STEPS, save_steps=20))
    fresh = first.copy(tmp_path / "fresh")
    there, program = tmp_path / "there", SCRIPTS / "guard_run.py"

    (first.root / "rest-0").touch()
    out = end(start(first, patched_script(tmp_path, "guard_run", SPENT), there), code=80)
    (first.root / "rest-0").unlink()
    # No retry.
    assert out.count("failed  train_expert") == 1
    assert json.loads((first.root / "results/guard.json").read_text())["outcome"] == "budget"
    (pushed,) = there.glob("state/tiny/*/step-*.json")
    n_saved = int(pushed.stem.removeprefix("step-"))
    assert 0 < n_saved < N_STEPS
    assert not (first.root / TARGET).exists()

    shutil.copytree(there, tmp_path / "there too")
    here, elsewhere = start(first, program, there), start(fresh, program, tmp_path / "there too")
    end(here, code=0)
    assert (first.root / "hooks").read_text().split() == ["budget", "finished"]
    assert f"step-{n_saved:08d} pulled" in end(elsewhere, code=0)

    found = [space.record("training.json") for space in (first, fresh)]
    assert [record["resumed_at_steps"] for record in found] == [[n_saved]] * 2
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    for space in (first, fresh):
        steps = (space.root / "results/tiny/steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in steps] == list(range(1, N_STEPS + 1))
    # The remote copy is the trained model, and both machines' dollars are counted.
    (weights,) = (there / "results/tiny/checkpoint").glob("*.safetensors")
    here_too = first.root / "results/tiny/checkpoint" / weights.name
    assert weights.read_bytes() == here_too.read_bytes()
    ledger = json.loads((fresh.root / "state/.guard/ledger.json").read_text())
    assert len(ledger["sessions"]) >= 2
