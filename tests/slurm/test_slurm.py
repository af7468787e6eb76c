"""profiles/slurm on a one-machine Slurm: jobs that end early, and processes on two nodes."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import workflow_space
from cluster import lacking, queue, running_cluster
from support import PATIENCE_S, wait_for

REASON = lacking()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

# First queried after 1 s instead of 5, as jobs take seconds here.
PROFILE = ("--workflow-profile", "profiles/slurm", "--slurm-init-seconds-before-status-checks", "1")
# All cards of both nodes, before any other job.
URGENT = ("sbatch", "--parsable", "--partition=gpuhi", "--nodes=2", "--gpus-per-node=2")
TRAINING = "results/tiny/training.json"


@pytest.fixture(scope="module", autouse=True)
def slurm() -> Iterator[None]:
    with running_cluster():
        yield


@contextmanager
def on_cluster(space: workflow_space.Workspace, *targets: str) -> Iterator["subprocess.Popen[str]"]:
    """Run Snakemake with the profile; it must succeed by the end of the block."""
    model = {**os.environ, "EXPERTFLOW_SLURM_GPU_MODEL": "h100"}
    with (space.root / "snakemake.log").open("w") as log:
        process = subprocess.Popen(
            [str(workflow_space.SNAKEMAKE), *PROFILE, *targets],
            cwd=space.root, stdout=log, stderr=log, env=model, text=True,
        )  # fmt: skip
    try:
        yield process
        process.wait(PATIENCE_S)
        assert process.returncode == 0, said(space)
    finally:
        process.kill()


def said(space: workflow_space.Workspace) -> str:
    logs = [space.root / "snakemake.log", *(space.root / ".snakemake/slurm_logs").rglob("*.log")]
    return "\n\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs)


def test_a_canceled_and_preempted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    space = workflow_space.make_workspace(tmp_path / "space")
    workflow_space.let_trainings_rest(space)
    value = workflow_space.manifest(max_steps=40, save_steps=10)
    value["sources"][0]["n_shards"] = 2
    space.write_manifest("tiny", value)
    straight = space.copy(tmp_path / "straight")
    (space.root / "rest-0").touch()

    def has_saved(step: int) -> Callable[[], object]:
        return lambda: list(space.root.glob(f"state/tiny/*/checkpoints/step-*{step}"))

    with on_cluster(space, workflow_space.REPORT) as process:
        # While earlier rules are queued and awaited.
        straight.run(TRAINING)
        wait_for(has_saved(10), during=process)
        (first,) = [entry.id for entry in queue() if entry.partition == "gpu"]
        listed = subprocess.run(
            ["squeue", "--noheader", "--format=%i %k"], capture_output=True, text=True, check=True
        )
        assert re.search(
            f"^{first} rule_on_gpu_.*train_expert_wildcards_tiny$", listed.stdout, re.M
        )
        subprocess.run(["scancel", first], check=True)
        wait_for(has_saved(20), during=process)
        # It has cards again, and loses them after one more step.
        subprocess.run([*URGENT, "--output=/dev/null", "--wrap=sleep 1"], check=True)
        wait_for(has_saved(21), during=process)
        (space.root / "rest-0").unlink()

    record = space.record("training.json")
    assert record["weights_sha256"] == straight.record("training.json")["weights_sha256"]
    assert record["resumed_at_steps"] == [11, 21]
    assert (space.root / "results/tiny/report.html").is_file()
    assert queue() == []
    # Stage, train and evaluate shared each of these.
    states = [entry.state for entry in queue(ended=True) if entry.partition == "gpu"]
    # Slurm requeues a preempted job that does not end within the grace time, under the same id.
    assert states in (["CANCELLED", "FAILED", "COMPLETED"], ["CANCELLED", "COMPLETED"])


def test_processes_on_one_node_and_on_two_train_what_they_do_without_slurm(tmp_path: Path) -> None:
    """gloo adds two numbers to the same sum in either order, so the weights have the same bits.

    The Snakemake that submitted them is killed, and the next one waits for them.
    """
    space = workflow_space.make_workspace(tmp_path / "space")
    space.write_manifest("tiny", workflow_space.manifest(world_size=2))
    space.write_manifest("other", workflow_space.manifest(world_size=2, n_nodes=2))
    records = [TRAINING, TRAINING.replace("tiny", "other")]
    plans = [f"results/{expert}/plan.json" for expert in ("tiny", "other")]
    space.run(*plans, "--resources", "gpu=2")
    local = space.copy(tmp_path / "local")

    n_before = len(queue(ended=True))
    with pytest.raises(AssertionError), on_cluster(space, *records) as killed:
        wait_for(lambda: [entry.partition for entry in queue()] == ["gpu"] * 2, during=killed)
        left = [entry.id for entry in queue()]
        killed.kill()
    with on_cluster(space, *records):
        local.run(TRAINING, "--resources", "gpu=2")

    one, alone = space.record("training.json"), local.record("training.json")
    two = space.record("../other/training.json")
    assert [r["world_size"] for r in (one, two, alone)] == [2, 2, 2]
    assert one["weights_sha256"] == two["weights_sha256"] == alone["weights_sha256"]
    assert one["loss_last"] == two["loss_last"]
    assert queue() == []
    log = (space.root / "snakemake.log").read_text()
    assert f"still in Slurm: waiting for {left[0]} {left[1]}; to stop them" in log
    assert one["n_sessions"] == two["n_sessions"] == 1, "the second jobs found all trained"
    assert sorted(entry.n_nodes for entry in queue(ended=True)[n_before:]) == [1, 1, 2, 2]
