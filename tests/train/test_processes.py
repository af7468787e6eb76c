"""Two processes train what one does, agree on where to go on, and go on where they were stopped."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_run
from resting import start_resting, wait_for_checkpoints
from support import LORA, SCRIPTS, run_trainer, start_trainer, write_tiny_run

from expertflow.train import job
from expertflow.train.job import TrainingJob

N_STEPS = 16


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").open()]


def made(folder: Path, **changes: Any) -> Path:
    """Make a run of 5 rows a step, so that two processes never have the same number of rows."""
    folder.mkdir()
    settings: dict[str, Any] = {
        "n_steps": N_STEPS, "batch_size": 2, "gradient_accumulation_steps": 3, "save_steps": 4,
        "save_total_limit": 9,
    }  # fmt: skip
    write_tiny_run(folder, **{**settings, **changes})
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["n_sequences"] % 12, "an epoch ends with a step that is not full"
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = made(tmp_path_factory.mktemp("run") / "alone", gradient_accumulation_steps=6)
    return folder, run_trainer(folder)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_equal_one(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, parallel: str
) -> None:
    folder, expected = alone
    both = made(tmp_path / "both", world_size=2, parallel=parallel)
    record = run_trainer(both)
    assert record["world_size"] == 2
    assert losses(both) == pytest.approx(losses(folder), abs=2e-5)
    for key in ("n_tokens", "n_target_tokens", "n_padding_tokens"):
        assert record[key] == expected[key], key
    points = [point["loss"] for point in record["eval_points"]]
    assert points == pytest.approx([p["loss"] for p in expected["eval_points"]], abs=2e-5)
    names = sorted(path.name for path in (both / "checkpoint").iterdir())
    assert names == sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (1, 2)])
def test_what_some_saved_others_resume(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, saved_by: int, resumed_by: int
) -> None:
    """Sharded states are written whole, so the number of processes may change on the way."""
    folder, _ = alone
    settings = {
        1: {"gradient_accumulation_steps": 6},
        2: {"world_size": 2, "parallel": "fsdp"},
    }
    run = made(tmp_path / "run", **settings[saved_by])
    stop_midway(run, tell)
    then = made(tmp_path / "then", **settings[resumed_by])
    shutil.copy(then / "plan.json", run / "plan.json")
    record = run_trainer(run)
    assert 0 < record["resumed_at_steps"][-1] < N_STEPS
    assert losses(run) == pytest.approx(losses(folder), abs=2e-5)
    assert len(list(run.glob("state/*"))) == 1


def test_stopped_in_any_way_they_end_with_the_same_bits(tmp_path: Path) -> None:
    """Killed together, told to stop, or left alone by a launcher that was killed."""
    changes = {"lora": LORA, "world_size": 2}
    straight = run_trainer(made(tmp_path / "straight", **changes))
    stopped = made(tmp_path / "stopped", **changes)
    for stop in (kill_all, kill_launcher, tell):
        stop_midway(stopped, stop)
    record = run_trainer(stopped)
    assert record["weights_sha256"] == straight["weights_sha256"]
    assert record["n_sessions"] == 4
    assert losses(stopped) == losses(tmp_path / "straight")


def test_a_wrong_number_of_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that starts one process without a word must not train something else."""
    folder = made(tmp_path / "run", world_size=2)
    environment = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    process = start_trainer(folder)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "the plan is for 2 processes and 1 started" in stderr.splitlines()[-1]


def stop_midway(folder: Path, stop: Callable[[subprocess.Popen[str]], None]) -> None:
    n_before = len(list(folder.glob("state/*/checkpoints/step-*")))
    process = start_resting(folder)
    wait_for_checkpoints(folder, process, n_before + 1)
    stop(process)
    process.communicate(timeout=180)
    assert process.returncode != 0
    assert not (folder / "training.json").exists()


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a run's launcher and trainers at once; a launcher gives each a session of its own."""
    trainers = psutil.Process(process.pid).children(recursive=True)
    for one in (process, *trainers):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended with its parent
            one.kill()
    wait_for_end(trainers)


def tell(process: subprocess.Popen[str]) -> None:
    process.terminate()


def kill_launcher(process: subprocess.Popen[str]) -> None:
    trainers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    wait_for_end(trainers)


def wait_for_end(processes: list[psutil.Process]) -> None:
    """Wait until none is at work; not every machine's first process clears dead orphans away."""
    deadline = time.monotonic() + 180
    while any(map(is_at_work, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


def is_at_work(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    alone = tiny_run.made(tmp_path / "alone", **SETTINGS, gradient_accumulation_steps=2)
    tiny_run.train(alone)
    both = tiny_run.made(tmp_path / "both", **SETTINGS, gradient_accumulation_steps=1, world_size=2)
    shutil.copytree(alone.state, both.state, dirs_exist_ok=True)
    process = in_two(Path(__file__).with_name("agreeing.py"), str(tmp_path / "both"))
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Finish a run in one process, and plan it for two; how many train decides nothing."""
    tiny_run.made(tmp_path, **SETTINGS, gradient_accumulation_steps=2)
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
