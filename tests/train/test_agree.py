"""The first process decides for all from where a run goes on, and whether there is one."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS
from tiny_run import made, train

from expertflow.train import job, processes
from expertflow.train.job import TrainingJob

TWO = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
    "--nproc-per-node=2",
]  # fmt: skip
PATHS = f"{SCRIPTS}:{Path(__file__).parents[1]}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
SETTINGS: dict[str, Any] = {"n_steps": 4, "save_steps": 2, "save_total_limit": 9, "batch_size": 2}


def in_two(script: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TWO, str(script), *arguments], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )


def test_all_go_on_from_the_checkpoint_that_the_first_one_sees(tmp_path: Path) -> None:
    alone = made(tmp_path / "alone", **SETTINGS, gradient_accumulation_steps=2)
    train(alone)
    both = made(tmp_path / "both", **SETTINGS, gradient_accumulation_steps=1, world_size=2)
    shutil.copytree(alone.state, both.state, dirs_exist_ok=True)
    process = in_two(Path(__file__).with_name("agreeing.py"), str(tmp_path / "both"))
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Finish a run in one process, and plan it for two; how many train decides nothing."""
    made(tmp_path, **SETTINGS, gradient_accumulation_steps=2)
    assert job.run_job(training_job(tmp_path))
    (tmp_path / "training.json").unlink()
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan |= {"world_size": 2, "parallel": "ddp", "gradient_accumulation_steps": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


def flags(folder: Path) -> list[str]:
    where = ["--results", str(folder), "--output", str(folder / "training.json")]
    return [*where, "--code", "c"]


def training_job(folder: Path) -> TrainingJob:
    records = {name: folder / f"{name}.json" for name in ("plan", "packing", "model", "staging")}
    places = {"state": folder / "state", "checkpoint": folder / "checkpoint"}
    return TrainingJob(**records, **places, output=folder / "training.json", code="c")


def test_what_is_finished_is_published_without_a_launcher(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise AssertionError("there is nothing to train")

    monkeypatch.setattr(processes, "launch_processes", refuse)
    assert job.run_job(training_job(finished))
    assert json.loads((finished / "training.json").read_text())["n_sessions"] == 1


def test_helpers_wait_while_the_first_one_waits_for_the_lock(finished: Path) -> None:
    """Another trainer ends the run meanwhile, so there is nothing to help with."""
    (outcome,) = finished.glob("state/*/outcome.json")
    hidden = outcome.rename(finished / "hidden.json")
    with outcome.with_name("lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = in_two(SCRIPTS / "train_expert.py", *flags(finished))
        assert process.stderr
        said = ""
        while "waiting for it" not in said:
            said += (line := process.stderr.readline())
            assert line, said
        hidden.rename(outcome)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert json.loads((finished / "training.json").read_text())["n_sessions"] == 1
