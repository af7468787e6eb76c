"""Whatever stops a run: the same command finishes it, with the same weights and nothing lost.

tests/train/test_fault_points.py stops the trainer alone at every point of a step. Here whole runs
are stopped, with the Snakemake, the shell and the pipes around the trainer.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupted import (
    N_STEPS,
    TARGET,
    Run,
    kill_jobs,
    make_prepared,
    never_left,
    rerun,
    until_gone,
)
from support import is_running
from workflow_space import Workspace

pytestmark = [pytest.mark.chain, pytest.mark.long]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_prepared(tmp_path_factory.mktemp("prepared") / "a space")


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


@pytest.fixture(scope="module")
def stopped(prepared: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = prepared.copy(tmp_path_factory.mktemp("stopped") / "space")
    run = Run(space, rest_from=20)
    run.wait_for_training(n_checkpoints=2)
    # The monitor starts beside the training, and may be later than its first checkpoints.
    readings = "state/tiny/*/gpu.jsonl"
    run.until(lambda: any(path.stat().st_size for path in space.root.glob(readings)))
    kill_everything(run)
    return space


@pytest.fixture
def space(prepared: Workspace, tmp_path: Path) -> Iterator[Workspace]:
    made = prepared.copy(tmp_path / "space")
    with never_left(made):
        yield made


def kill_everything(run: Run) -> None:
    # Snakemake first: it would start a job again that it sees killed.
    run.process.kill()
    run.end()
    kill_jobs(run.space)


def steps(space: Workspace) -> list[int]:
    lines = (space.root / "results/tiny/steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("number", SIGNALS)
def test_snakemake_alone_is_stopped(
    space: Workspace, expected: str, number: signal.Signals
) -> None:
    """The trainer does not hear of it, and is waited for: by this Snakemake, or by the next."""
    run = Run(space)
    run.wait_for_training()
    run.send("snakemake", number)
    run.go_on()
    assert run.end() != 0
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 1


def test_the_whole_group_is_stopped_again_and_again(space: Workspace, expected: str) -> None:
    starting = Run(space)
    starting.until((space.root / "results/tiny/logs/train_expert.log").exists)
    starting.send("group", signal.SIGTERM)
    assert starting.end() != 0
    for number in SIGNALS:
        run = Run(space)
        run.wait_for_training()
        run.send("group", number)
        assert run.end() != 0, run.told()
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 1 + len(SIGNALS)
    assert steps(space) == list(range(1, N_STEPS + 1))


def test_the_trainer_alone_is_stopped_again_and_again(space: Workspace, expected: str) -> None:
    """The same command starts it again three times; then the command is given once more."""
    run = Run(space)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
        run.wait_for_training()
        run.send("trainer", number)
    assert run.end() == 1, run.told()
    again = Run(space)
    again.wait_for_training()
    # No file of this process may grow any more, as if the disk were full.
    trainer = again.trainer()
    assert trainer is not None
    resource.prlimit(trainer, resource.RLIMIT_FSIZE, (1, 1))
    again.go_on()
    assert again.end() == 0, again.told()
    assert "File too large" in again.log.read_text()
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 6
    assert steps(space) == list(range(1, N_STEPS + 1))


def test_two_runs_at_once(space: Workspace, expected: str) -> None:
    """The first is one that nohup started, so that a closed terminal does not stop it."""
    run = Run(space, nohup=True)
    run.wait_for_training()
    run.send("group", signal.SIGHUP)
    second = space.snakemake(TARGET)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1].startswith(
        f"error: tiny is being made by another run, process {run.process.pid} on "
    )
    assert space.snakemake("-n", TARGET).returncode == 0, "to look is allowed"
    other = space.snakemake("results/other/datasets.json")
    assert other.returncode == 0, other.stderr[-2000:]
    run.go_on()
    assert run.end() == 0, run.told()
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["n_sessions"] == 1


@pytest.fixture
def small_disk(space: Workspace) -> Iterator[Path]:
    state = space.root / "state"
    state.mkdir(exist_ok=True)
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
    run.wait_for_training()
    trainer = run.trainer()
    assert trainer is not None
    fill(small_disk / "filler")
    run.go_on()
    while is_running(trainer):
        # Again and again: it may just have made room by removing its oldest checkpoint.
        fill(small_disk / "filler")
        time.sleep(0.02)
    fill(small_disk / "filler")
    assert run.end() == 1, "it is full for the retries, too"
    until_gone(space)  # what writes the log ends after the trainer
    last = space.root / "results/tiny/logs/train_expert.log"
    assert "free" in last.read_text().splitlines()[-1]
    assert list(small_disk.glob("tiny/*/checkpoints/step-*")), "earlier ones stay"
    assert not list(small_disk.rglob("*.partial"))
    (small_disk / "filler").unlink()
    assert rerun(space)["weights_sha256"] == expected


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


Damage = list[tuple[Callable[[Path], object], str]]
NEWEST = "state/tiny/*/checkpoints/step-*"
CHECKPOINTS: dict[str, Damage] = {
    "zeros for weights": [(zero, f"{NEWEST}/weights.safetensors")],
    "cut progress and logs": [
        (cut, f"{NEWEST}/progress.json"),
        (cut, "state/tiny/*/steps.jsonl"),
        (cut, "state/tiny/*/gpu.jsonl"),
        (cut, "state/hashes.json"),
    ],
}
FINISHED: dict[str, Damage] = {
    "no outcome": [(cut, "state/tiny/*/outcome.json"), (Path.unlink, TARGET)],
    # The published model shares its bytes.
    "no model": [(zero, "results/tiny/checkpoint/model.safetensors"), (cut, TARGET)],
    "no record": [
        (zero, "results/tiny/plan.json"),
        (zero, "results/tiny/.packing.json.fingerprint"),
        (cut, TARGET),
    ],
}


def spoil(space: Workspace, damage: Damage) -> None:
    for spoiling, pattern in damage:
        spoiling(max(space.root.glob(pattern)))


@pytest.mark.parametrize("damage", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_power_cut_spoils_the_newest_checkpoint(
    stopped: Workspace, tmp_path: Path, expected: str, damage: Damage
) -> None:
    space = stopped.copy(tmp_path / "space")
    # Of three, the oldest was about to be removed.
    *_, before, _ = sorted(space.root.glob(NEWEST))
    spoil(space, damage)
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert record["resumed_at_steps"] == [int(before.name.removeprefix("step-"))]
    assert steps(space) == list(range(1, N_STEPS + 1))


@pytest.mark.parametrize("damage", FINISHED.values(), ids=FINISHED)
def test_a_power_cut_spoils_a_finished_run(
    straight: Workspace, tmp_path: Path, expected: str, damage: Damage
) -> None:
    """Its last checkpoint is there, so nothing is trained again."""
    space = straight.copy(tmp_path / "space")
    spoil(space, damage)
    record = rerun(space)
    assert record["weights_sha256"] == expected
    assert set(record["resumed_at_steps"]) <= {N_STEPS}
    assert space.record("plan.json")["n_steps"] == N_STEPS
    published = "results/tiny/checkpoint/model.safetensors"
    assert (space.root / published).read_bytes() == (straight.root / published).read_bytes()
