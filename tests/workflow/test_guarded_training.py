"""A real training that its budget stops ends with the same weights, here and on a fresh machine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS
from workflow_space import LIMIT_S, SNAKEMAKE, Workspace, manifest

pytestmark = pytest.mark.chain
TARGET = "results/tiny/training.json"
# Money that is spent as soon as there is a checkpoint: a stop amid the training, however slow.
SPENT = """
import sys
from pathlib import Path

sys.path.insert(0, {scripts!r})
from expertflow.rental.guard.ledger import Meter

usd = Meter.usd
has_saved = lambda: any(Path("state").glob("tiny/*/checkpoints/step-*[1-9]?"))
Meter.usd = lambda meter, **ahead: 99.0 if has_saved() else usd(meter, **ahead)
sys.argv[0] = {program!r}
exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"))
"""


def guard(space: Workspace, program: Path, there: Path) -> "subprocess.Popen[str]":
    """Start the same guarded command in a workspace."""
    options = ["--usd-per-hour", "2.49", "--max-usd", "50", "--sync-to", str(there)]
    options += ["--skip", "base_model", "--on-finish", "echo $EXPERTFLOW_OUTCOME >> hooks"]
    options += ["--disk-stays"]
    command = [str(SNAKEMAKE), "--cores", "2", TARGET]
    return subprocess.Popen(
        [sys.executable, str(program), *options, "--", *command],
        cwd=space.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def plain(space: Workspace) -> "subprocess.Popen[str]":
    """Start the command as it is."""
    return subprocess.Popen(
        [str(SNAKEMAKE), "--cores", "2", TARGET],
        cwd=space.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: "subprocess.Popen[str]", *, code: int) -> str:
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        # Its supervisor ends what it has started.
        process.kill()
    assert process.returncode == code, out[-6000:]
    return out


def record(space: Workspace, name: str = TARGET) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((space.root / name).read_text())
    return value


def test_a_budget_costs_no_weights(finished: Workspace, tmp_path: Path) -> None:
    first = finished.copy(tmp_path / "first")
    first.write_manifest("tiny", manifest(max_steps=500, save_steps=20))
    straight, fresh = first.copy(tmp_path / "straight"), first.copy(tmp_path / "fresh")
    there, spent = tmp_path / "there", tmp_path / "spent.py"
    program = SCRIPTS / "guard_run.py"
    spent.write_text(SPENT.format(scripts=str(SCRIPTS), program=str(program)))

    uninterrupted = plain(straight)
    out = end(guard(first, spent, there), code=80)
    # No retry.
    assert len(re.findall(r"^(?:local)?rule train_expert:", out, re.MULTILINE)) == 1
    assert record(first, "results/guard.json")["outcome"] == "budget"
    (pushed,) = there.glob("state/tiny/*/step-*.json")
    n_saved = int(pushed.stem.removeprefix("step-"))
    assert 0 < n_saved < 500
    assert not (first.root / TARGET).exists()
    end(uninterrupted, code=0)

    shutil.copytree(there, tmp_path / "there too")
    here, elsewhere = guard(first, program, there), guard(fresh, program, tmp_path / "there too")
    end(here, code=0)
    assert (first.root / "hooks").read_text().split() == ["budget", "finished"]
    assert f"step-{n_saved:08d} pulled" in end(elsewhere, code=0)

    expected = record(straight)
    assert expected["resumed_at_steps"] == []
    for space in (first, fresh):
        found = record(space)
        assert found["resumed_at_steps"] == [n_saved]
        assert found["weights_sha256"] == expected["weights_sha256"]
        steps = (space.root / "results/tiny/steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in steps] == list(range(1, 501))
    # The copy elsewhere is the trained model, and both machines' dollars are known.
    (weights,) = (there / "results/tiny/checkpoint").glob("*.safetensors")
    assert (
        weights.read_bytes()
        == (first.root / TARGET).with_name("checkpoint").joinpath(weights.name).read_bytes()
    )
    ledger = json.loads((fresh.root / "state/.guard/ledger.json").read_text())
    assert len(ledger["sessions"]) >= 2
