"""Whatever stops a run, the same command finishes it, with the same weights and nothing lost.

tests/train/test_resume.py stops only the trainer, at every point of a step. Here complete runs
are stopped, with Snakemake, the shell and the pipes around the trainer.
"""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupted import TARGET, Run, finish, kill_jobs, rerun
from support import is_running
from workflow_space import REPORT, Workspace, let_trainings_rest, manifest

from expertflow.core.attempts import read_attempts

pytestmark = [pytest.mark.chain, pytest.mark.long]
N_STEPS = 60


@pytest.fixture(scope="module")
def prepared(finished: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a workspace in which everything before training is done, and nothing after."""
    space = finished.copy(tmp_path_factory.mktemp("prepared") / "a space")
    let_trainings_rest(space)
    for name in ("state/tiny", "results/tiny/checkpoint"):
        shutil.rmtree(space.root / name)
    for path in space.root.glob("results/tiny/logs/train_expert.*"):
        path.unlink()
    space.write_manifest("tiny", manifest(max_steps=N_STEPS, save_steps=10, logging_steps=1))
    space.run("results/tiny/staging.json")
    return space


@pytest.fixture(scope="module")
def straight(prepared: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = prepared.copy(tmp_path_factory.mktemp("straight") / "space")
    rerun(space)
    return space


@pytest.fixture(scope="module")
def expected(straight: Workspace) -> str:
    record = straight.record("training.json")
    assert record["n_sessions"] == 1
    return str(record["weights_sha256"])


@pytest.fixture
def space(prepared: Workspace, tmp_path: Path) -> Iterator[Workspace]:
    made = prepared.copy(tmp_path / "space")
    yield made
    kill_jobs(made)


def steps(space: Workspace) -> list[int]:
    lines = (space.root / "results/tiny/steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_only_snakemake_is_killed(space: Workspace, expected: str) -> None:
    """The trainer is not notified, and the next Snakemake waits for it."""
    run = Run(space)
    run.wait_for_training()
    run.send("snakemake", signal.SIGKILL)
    run.go_on()
    assert run.end() != 0
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 1


def test_the_entire_group_is_stopped_repeatedly(space: Workspace, expected: str) -> None:
    starting = Run(space, warm=False)
    starting.until((space.root / "results/tiny/logs/train_expert.log").exists)
    starting.send("group", signal.SIGINT)
    assert starting.end() != 0
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        run = Run(space, warm=False)
        run.wait_for_training()
        run.send("group", number)
        assert run.end() != 0, run.told()
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 4
    assert steps(space) == list(range(1, N_STEPS + 1))


def test_the_trainer_alone_is_stopped_repeatedly(space: Workspace, expected: str) -> None:
    """The same command restarts it three times, and the bill has every attempt."""
    run, killed_s = Run(space), 0.0
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(run.wait_for_training(), number)
        killed_s = time.time()
    # This process cannot grow any file, as if the disk were full: its error is not recorded.
    resource.prlimit(run.wait_for_training(), resource.RLIMIT_FSIZE, (1, 1))
    record = finish(run)
    assert run.log.read_text().count("failed  train_expert") == 3
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 4
    assert steps(space) == list(range(1, N_STEPS + 1))
    attempts = read_attempts(space.root / "results/tiny/logs/train_expert.attempts.json")
    assert len(attempts) == 4 and attempts[1].code is None and attempts[3].code == 0
    assert attempts[1].start_s < attempts[1].end_s <= killed_s
    space.run(REPORT)
    bill = space.record("report.json")["bill"]
    stages = {stage["stage"]: stage for stage in bill["stages"]}
    assert [stages["train_expert"][key] for key in ("jobs", "attempts")] == [1, len(attempts)]
    assert stages.keys() >= {"fetch_source", "evaluate_expert", "build_report"}
    wall_s = sum(stage["wall_s"] for stage in stages.values())
    wall_s += bill["between_jobs_s"] - bill["overlap_s"]
    assert wall_s == pytest.approx(bill["machine"]["wall_s"], rel=0.01)
    (lost,) = bill["lost"]
    failed_s = sum(attempt.end_s - attempt.start_s for attempt in attempts[:-1])
    assert lost["attempts"] == len(attempts) - 1 and 0 < lost["wall_s"] <= failed_s
    space.run(TARGET, "--forcerun", "train_expert")
    assert read_attempts(space.root / "results/tiny/logs/train_expert.attempts.json") == attempts


def test_two_runs_at_once(space: Workspace, expected: str) -> None:
    """The first is started by nohup, so that a closed terminal does not stop it.

    Asked to stop, it waits for its trainer, which is not notified.
    """
    run = Run(space, nohup=True)
    run.wait_for_training()
    run.send("group", signal.SIGHUP)
    line = space.refused(TARGET)
    assert f"error: tiny is being made by another run, process {run.process.pid} on " in line
    assert space.jobs(TARGET), "to look is allowed"
    space.run("results/other/bundle.tar")
    assert space.script("verify_results").stdout.endswith(": intact\n")
    run.send("snakemake", signal.SIGTERM)
    run.go_on()
    assert run.end() != 0
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 1


@pytest.fixture
def small_disk(space: Workspace) -> Iterator[Path]:
    state = space.root / "state"
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(state)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root mounts a small disk")
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield state
    subprocess.run(["umount", "--lazy", str(state)], check=True)


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as stream:
        try:
            while stream.write(bytes(1 << 12)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_full_disk(space: Workspace, small_disk: Path, expected: str) -> None:
    run = Run(space)
    trainer = run.wait_for_training()
    fill(small_disk / "filler")
    run.go_on()
    while is_running(trainer):
        # Repeatedly: it may just have made room by removing its oldest checkpoint.
        fill(small_disk / "filler")
        time.sleep(0.02)
    assert run.checkpoints(), "earlier ones stay"
    assert run.end() != 0
    assert re.search("^error: .*free (some|space)", run.log.read_text().splitlines()[-1])
    (small_disk / "filler").unlink()
    assert rerun(space)["weights_sha256"] == expected


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def test_a_power_failure_damages_the_newest_checkpoint(space: Workspace, expected: str) -> None:
    run = Run(space, rest_from=20)
    run.wait_for_training(n_checkpoints=2)
    # The monitor starts in parallel, possibly after the first checkpoints.
    readings = "state/tiny/*/gpu.jsonl"
    run.until(lambda: any(path.stat().st_size for path in space.root.glob(readings)))
    # Snakemake first: it would restart a killed job.
    run.send("snakemake", signal.SIGKILL)
    run.end()
    kill_jobs(space)
    *_, before, newest = run.checkpoints()
    zero(newest / "weights.safetensors")
    for pattern in ("state/tiny/*/steps.jsonl", readings, "state/hashes.json"):
        cut(*space.root.glob(pattern))
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["resumed_at_steps"] == [int(before.name.removeprefix("step-"))]
    assert steps(space) == list(range(1, N_STEPS + 1))


# The published model shares its bytes with the state's.
MODEL = "results/tiny/checkpoint/model.safetensors"
FINISHED: list[dict[str, Callable[[Path], object]]] = [
    {"state/tiny/*/outcome.json": cut, TARGET: Path.unlink},
    {
        MODEL: zero,
        "results/tiny/plan.json": zero,
        "results/tiny/.packing.json.fingerprint": zero,
        TARGET: cut,
    },
]


def test_power_failures_damage_finished_runs(
    straight: Workspace, tmp_path: Path, expected: str
) -> None:
    """The last checkpoint exists, so nothing is trained again."""
    space = straight.copy(tmp_path / "space")
    for damage in FINISHED:
        for pattern, spoil in damage.items():
            spoil(*space.root.glob(pattern))
        record = rerun(space)
        assert record["weights_sha256"] == expected
        assert set(record["resumed_at_steps"]) <= {N_STEPS}
        assert space.record("plan.json")["n_steps"] == N_STEPS
        assert (space.root / MODEL).read_bytes() == (straight.root / MODEL).read_bytes()
