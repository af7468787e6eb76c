"""Two processes train like one, and resume where they were stopped."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from support import LORA, PATIENCE_S, is_running, wait_for, write_tiny_run
from trainers import Trainers

from expertflow.core.records import read_record
from expertflow.report.profile import sum_by_kind
from expertflow.train.model.load import load_for_export
from expertflow.train.model.weights import list_trained_parameters
from expertflow.train.processes import PATIENCE, Processes
from expertflow.train.profiler import KERNELS, PROFILE
from expertflow.train.records import KernelProfile
from expertflow.train.saved import checkpoint_files

pytestmark = pytest.mark.long

N_STEPS = 16
FSDP = {"world_size": 2, "parallel": "fsdp"}
ALONE = {"gradient_accumulation_steps": 6}
Settings = dict[str, Any]
Trained = tuple[Path, dict[str, Any]]
TERM, KILL = signal.SIGTERM, signal.SIGKILL


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").open()]


def made(folder: Path, **changes: Any) -> Path:
    """Make a run of 5 rows per step, so that two processes never have the same number of rows."""
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
def alone(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = made(tmp_path_factory.mktemp("run") / "alone", **ALONE)
    return folder, trainers.finish(folder)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def both(
    trainers: Trainers, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Trained:
    changes = {"world_size": 2, "parallel": request.param, "profile_steps": 3}
    folder = made(tmp_path_factory.mktemp("run") / "both", **changes)
    return folder, trainers.finish(folder, n_processes=2)


def test_two_processes_equal_one(alone: Trained, both: Trained) -> None:
    (folder, expected), (shared, record) = alone, both
    assert record["world_size"] == 2
    assert losses(shared) == pytest.approx(losses(folder), abs=2e-5)
    for key in ("n_tokens", "n_target_tokens", "n_padding_tokens"):
        assert record[key] == expected[key], key
    points = [point["loss"] for point in record["eval_points"]]
    assert points == pytest.approx([p["loss"] for p in expected["eval_points"]], abs=2e-5)
    names, others = ({p.name for p in (f / "checkpoint").iterdir()} for f in (shared, folder))
    assert names == others
    # They have the profile of the first.
    profile = read_record(KernelProfile, shared / PROFILE / KERNELS)
    assert profile.n_steps == 3
    assert "communication" in {kind.kind for kind in sum_by_kind(profile)}


def test_they_publish_each_checkpoint_completely(both: Trained) -> None:
    folder, record = both
    assert [candidate["step"] for candidate in record["candidates"]] == [4, 8, 12, 16]
    (state,) = (folder / "state").iterdir()
    for candidate in record["candidates"]:
        # The files in results, not in the state.
        published = load_for_export(
            folder / "checkpoint" / candidate["path"], base="", method="full", precision="fp32",
            attention_name="sdpa",
        )  # fmt: skip
        found = list_trained_parameters(published)
        saved = checkpoint_files.directory_of(state, candidate["step"]) / checkpoint_files.WEIGHTS
        expected = load_file(saved)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_head_trained_with_an_adapter_is_saved_completely(
    trainers: Trainers, tmp_path: Path
) -> None:
    lora = replace(LORA, modules_to_save=("embed_tokens", "lm_head"), dropout=0.0)
    alone = made(tmp_path / "alone", lora=lora, **ALONE)
    trainers.finish(alone)
    for parallel in ("ddp", "fsdp"):
        both = made(tmp_path / parallel, lora=lora, world_size=2, parallel=parallel)
        trainers.finish(both, n_processes=2)
        assert losses(both) == pytest.approx(losses(alone), abs=2e-5)
        (state,) = (both / "state").iterdir()
        saved = load_file(checkpoint_files.directory_of(state, N_STEPS) / checkpoint_files.WEIGHTS)
        published = load_file(both / "checkpoint" / "adapter_model.safetensors")
        for name, tensor in saved.items():
            short = name.replace(".modules_to_save", "").replace(".default", "")
            assert torch.equal(published[short.removeprefix("model.")], tensor)


@pytest.mark.parametrize(("first", "second"), [(FSDP, ALONE), (ALONE, FSDP)])
def test_another_number_of_processes_can_resume(
    trainers: Trainers, alone: Trained, tmp_path: Path, first: Settings, second: Settings
) -> None:
    """Sharded states are saved unsharded, so sessions may differ in the number of processes."""
    run, then = made(tmp_path / "run", **first), made(tmp_path / "then", **second)
    fault = ("enter:checkpoint", 2, TERM)
    stopped = trainers.train(run, fault, n_processes=first.get("world_size"))
    assert stopped["code"] != 0 and not (run / "training.json").exists()
    shutil.copy(then / "plan.json", run / "plan.json")
    record = trainers.finish(run, n_processes=second.get("world_size"))
    assert 0 < record["resumed_at_steps"][-1] < N_STEPS
    assert losses(run) == pytest.approx(losses(alone[0]), abs=2e-5)
    assert len(list(run.glob("state/*"))) == 1


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_stopped_in_any_way_they_end_with_the_same_bits(
    trainers: Trainers, tmp_path: Path, parallel: str
) -> None:
    """Killed together, orphaned by a killed launcher, or stopped by a real one."""
    stopped, straight = (
        made(tmp_path / name, lora=LORA, world_size=2, parallel=parallel)
        for name in ("stopped", "straight")
    )
    expected = trainers.finish(straight, n_processes=2)
    # The first checkpoint is on disk before the second is taken.
    assert trainers.train(stopped, ("enter:take", 2, KILL), n_processes=2)["code"] != 0
    kill_launcher(trainers, stopped)
    if parallel == "ddp":
        assert trainers.train(stopped, ("enter:checkpoint", 1, TERM), n_processes=2)["code"] != 0
    else:
        tell_launcher(stopped)  # whose processes import torch
    record = trainers.finish(stopped, n_processes=2)
    assert record["weights_sha256"] == expected["weights_sha256"]
    assert record["n_sessions"] == 4
    assert losses(stopped) == losses(straight)


def kill_launcher(trainers: Trainers, folder: Path) -> None:
    fired = folder / "fired"
    fired.unlink()
    trainers.ask(folder, fault=("enter:take", 1, signal.SIGSTOP), n_processes=2)
    wait_for(fired.exists)
    (launcher,) = psutil.Process(trainers.server.pid).children()
    left_alone = launcher.children()
    launcher.kill()
    assert trainers.answer()["code"] == -KILL
    for process in left_alone:
        process.resume()
    # Not every machine's first process collects dead orphans.
    wait_for(lambda: not any(map(is_running, left_alone)))


def tell_launcher(folder: Path) -> None:
    def n_saved() -> int:
        return len(list(folder.glob("state/*/checkpoints/step-*")))

    n_before = n_saved()
    command = [sys.executable, str(Path(__file__).with_name("resting.py")), "--code", "c"]
    command += ["--results", str(folder), "--output", str(folder / "training.json")]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(command, stderr=log)
    wait_for(lambda: n_saved() > n_before, during=process)
    process.terminate()
    assert process.wait(PATIENCE_S) != 0
    assert not (folder / "training.json").exists()


def test_a_wrong_number_of_processes_is_rejected(trainers: Trainers, tmp_path: Path) -> None:
    """A launcher that silently starts one process must not train something else."""
    run = made(tmp_path / "run", world_size=2)
    assert trainers.train(run, n_processes=1)["code"] == 1
    message = (run / "log").read_text().splitlines()[-1]
    assert "the plan is for 2 processes, but 1 started" in message


def test_all_groups_wait_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "new_group", lambda **given: asked.update(given))
    several: Any = SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=2)
    Processes(several)
    assert asked["timeout"] == PATIENCE


def test_helpers_wait_for_the_first_one(trainers: Trainers, both: Trained, tmp_path: Path) -> None:
    """Another trainer finishes the run meanwhile, so there is nothing left to do."""
    folder = shutil.copytree(both[0], tmp_path / "run")
    for name in ("training.json", "log"):
        (folder / name).unlink()
    (outcome,) = folder.glob("state/*/outcome.json")
    hidden = outcome.rename(folder / "hidden.json")
    with outcome.with_name("lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trainers.ask(folder, n_processes=2)
        log = folder / "log"
        wait_for(lambda: log.is_file() and "waiting for it" in log.read_text())
        hidden.rename(outcome)
    assert trainers.answer()["code"] == 0, log.read_text()
    assert json.loads((folder / "training.json").read_text())["n_sessions"] == 1
