"""profiles/slurm on a Slurm of one machine: jobs that end early, and processes on two nodes."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import lacking, queue, running_cluster
from workflow_space import SNAKEMAKE, Workspace, make_workspace, manifest

REASON = lacking()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

PATIENCE_S = 900
PROFILE = ("--workflow-profile", "profiles/slurm")
# First asked after 1 s and not after 5, as jobs take seconds here.
QUICK = (*PROFILE, "--slurm-init-seconds-before-status-checks", "1")
SHORT = "training={max_steps: 90, save_steps: 20, eval_steps: 45, n_threads: 1}"
N_STEPS = 90
# All cards of both nodes, before any other job.
URGENT = ("sbatch", "--parsable", "--partition=gpuhi", "--nodes=2", "--gpus-per-node=2")


@pytest.fixture(scope="module", autouse=True)
def slurm() -> Iterator[None]:
    with running_cluster():
        yield


def sql_space(root: Path) -> Workspace:
    """Make the SQL demo with few documents, in two shards."""
    space = make_workspace(root)
    path = space.root / "config" / "experts" / "expert-sql.yaml"
    expert = yaml.safe_load(path.read_text())
    expert["demo"]["sources"][0] |= {"n_documents": 600, "n_shards": 2}
    expert["demo"]["data"] = {"eval_fraction": 0.05}
    expert["demo"]["evaluation"] |= {"max_examples": 8, "batch_size": 8}
    space.write_manifest("expert-sql", expert)
    (space.root / "config" / "config.yaml").write_text(
        yaml.safe_dump({"experts": {"expert-sql": {}}})
    )
    return space


@contextmanager
def on_cluster(space: Workspace, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Snakemake with the profile; it has to succeed by the end of the block."""
    model = {**os.environ, "EXPERTFLOW_SLURM_GPU_MODEL": "h100"}
    with (space.root / "snakemake.log").open("w") as log:
        process = subprocess.Popen(
            [str(SNAKEMAKE), *QUICK, *arguments],
            cwd=space.root, stdout=log, stderr=log, env=model, text=True,
        )  # fmt: skip
    try:
        yield process
        process.wait(PATIENCE_S)
        assert process.returncode == 0, said(space)
    finally:
        process.kill()


def said(space: Workspace) -> str:
    logs = [space.root / "snakemake.log", *(space.root / ".snakemake/slurm_logs").rglob("*.log")]
    return "\n\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], space: Workspace) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert process.poll() is None, said(space)
        assert time.monotonic() < deadline, said(space)
        time.sleep(0.05)


def training(space: Workspace, expert: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(
        (space.root / f"results/{expert}/training.json").read_text()
    )
    return record


def test_a_training_that_is_cancelled_and_preempted_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight, space = sql_space(tmp_path / "straight"), sql_space(tmp_path / "cluster")
    log = space.root / "results/expert-sql/logs/train_expert.log"

    def has_done(n_steps: int) -> bool:
        # A retry starts a new log.
        try:
            told = re.findall(rf"step (\d+)/{N_STEPS}", log.read_text())
        except FileNotFoundError:
            return False
        return max(map(int, told), default=0) >= n_steps

    with on_cluster(space, "results/expert-sql/report.json", "--config", SHORT) as process:
        # While the rules before it are queued for and waited for.
        done = straight.snakemake("results/expert-sql/training.json", "--config", SHORT)
        assert done.returncode == 0, done.stderr
        wait_for(lambda: has_done(10), process, space)
        (first,) = [entry.id for entry in queue() if entry.partition == "gpu"]
        subprocess.run(["scancel", first], check=True)
        wait_for(lambda: first not in [entry.id for entry in queue()], process, space)
        log.write_text("")  # what the retry tells counts from here on, wherever the first one ended
        wait_for(lambda: has_done(20), process, space)
        subprocess.run([*URGENT, "--output=/dev/null", "--wrap=sleep 1"], check=True)

    record = training(space, "expert-sql")
    assert record["weights_sha256"] == training(straight, "expert-sql")["weights_sha256"]
    assert record["n_sessions"] == 3
    assert all(0 < step < N_STEPS for step in record["resumed_at_steps"])
    assert (space.root / "results/expert-sql/report.html").is_file()
    assert queue() == []
    # Stage, train and evaluate shared each of these.
    states = [entry.state for entry in queue(ended=True) if entry.partition == "gpu"]
    # Slurm requeues a preempted job that does not end within the grace, under the same number.
    assert states in (["CANCELLED", "FAILED", "COMPLETED"], ["CANCELLED", "COMPLETED"])


def test_processes_on_one_node_and_on_two_train_what_they_do_without_slurm(tmp_path: Path) -> None:
    """gloo adds two numbers in either order to the same sum, so the weights have the same bits.

    The Snakemake that submitted them is killed, and the next one waits for them.
    """
    space = make_workspace(tmp_path / "space")
    space.write_manifest("tiny", manifest(world_size=2))
    space.write_manifest("other", manifest(world_size=2, n_nodes=2))
    records = [f"results/{expert}/training.json" for expert in ("tiny", "other")]
    ready = [f"results/{expert}/plan.json" for expert in ("tiny", "other")]
    done = space.snakemake(*ready, "--resources", "gpu=2")
    assert done.returncode == 0, done.stderr
    local = space.copy(tmp_path / "local")

    n_before = len(queue(ended=True))
    with pytest.raises(AssertionError), on_cluster(space, *records) as killed:
        wait_for(lambda: [entry.partition for entry in queue()] == ["gpu"] * 2, killed, space)
        left = [entry.id for entry in queue()]
        killed.kill()
    with on_cluster(space, *records):
        done = local.snakemake(records[0], "--resources", "gpu=2")
        assert done.returncode == 0, done.stderr

    one, two, alone = training(space, "tiny"), training(space, "other"), training(local, "tiny")
    assert [r["world_size"] for r in (one, two, alone)] == [2, 2, 2]
    assert one["weights_sha256"] == two["weights_sha256"] == alone["weights_sha256"]
    assert one["loss_last"] == two["loss_last"]
    assert queue() == []
    log = (space.root / "snakemake.log").read_text()
    assert f"still with Slurm: waiting for {left[0]} {left[1]}; to end them" in log
    assert one["n_sessions"] == two["n_sessions"] == 1, "the second jobs found all trained"
    assert sorted(entry.n_nodes for entry in queue(ended=True)[n_before:]) == [1, 1, 2, 2]
