"""How several processes are started, and what a closed terminal does to a trainer."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertflow.core.errors import TrainingError
from expertflow.train import processes
from expertflow.train.processes import launch_command
from expertflow.train.run import stop_on_signals

COMMAND = ["train_expert.py", "--output", "a b.json"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return squeue


def answer(squeue: Path, script: str) -> None:
    squeue.write_text(f"#!/bin/sh\n{script}\n")
    squeue.chmod(0o755)


def test_without_slurm_all_processes_are_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert launch_command(4, COMMAND) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        "--nproc-per-node=4", *COMMAND,
    ]  # fmt: skip


def test_in_a_job_of_one_node_too(job: Path) -> None:
    answer(job, "echo 1")
    assert "--standalone" in launch_command(4, COMMAND)


def test_in_a_job_of_two_nodes_each_is_given_half(job: Path) -> None:
    answer(job, '[ "$*" = "--noheader --jobs=7 --format=%D" ] && echo 2')
    command = launch_command(4, COMMAND)
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    script = next(part for part in command if part.startswith("exec "))
    assert "--nnodes=2 --nproc-per-node=2" in script
    assert '--master-addr="$SLURM_LAUNCH_NODE_IPADDR" --node-rank="$SLURM_NODEID" "$@"' in script
    assert command[-len(COMMAND) :] == COMMAND


def test_processes_that_cannot_be_shared_out_are_refused(job: Path) -> None:
    answer(job, "echo 3")
    with pytest.raises(TrainingError, match="4 processes cannot be spread evenly over the 3 nodes"):
        launch_command(4, COMMAND)


@pytest.mark.parametrize("script", ["exit 1", "echo", "echo many"])
def test_a_slurm_that_does_not_answer_is_no_single_node(job: Path, script: str) -> None:
    answer(job, script)
    with pytest.raises(TrainingError, match="how many nodes job 7 has is not known"):
        launch_command(4, COMMAND)


def test_a_port_is_one_that_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.free_port() in processes.PORTS
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(processes, "PORTS", range(port, port + 1))
        with pytest.raises(TrainingError, match=f"ports {port} to {port}: none can be taken"):
            processes.free_port()


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def inherited(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


def test_the_trainer(inherited: signal.Handlers) -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop() == (inherited is signal.SIG_DFL)
    assert signal.getsignal(signal.SIGHUP) is inherited


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trainer_in_the_background_of_a_script_still_saves_and_ends(
    number: signal.Signals,
) -> None:
    """A shell starts it with interrupts ignored."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop()
    finally:
        signal.signal(number, before)


def test_the_launcher_of_several(
    inherited: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone, it stops its trainers at a hang-up, whatever it inherited."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    for variable in (name, processes.RANK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(variable, "")  # so that what is set is undone
        monkeypatch.delenv(variable)
    for exec_ in ("execv", "execvp"):
        monkeypatch.setattr(os, exec_, lambda *_: None)
    processes.launch_processes(2)
    heard = os.environ.get(name, "SIGHUP").split(",")
    assert ("SIGHUP" in heard) == (inherited is signal.SIG_DFL)
    assert inherited is signal.SIG_DFL or {"SIGTERM", "SIGINT"} <= set(heard)
