"""One run at a time makes an expert; it waits for killed runs' jobs; a stop leaves no process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support import PATIENCE_S, SCRIPTS, is_running, wait_for

from expertflow.config import run_lock
from expertflow.config.attach import _before_first_job
from expertflow.config.run_lock import find_orphans, hold_experts
from expertflow.core.locks import EXPERT_LOCKS

PARENT = """
import subprocess
from expertflow.config.run_lock import sign_jobs
sign_jobs()
job = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(job.pid, flush=True)
job.wait()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(run_lock, "SLURM_POLL_S", 0.01)
    return tmp_path


def job(**wildcards: str) -> SimpleNamespace:
    return SimpleNamespace(wildcards_dict=wildcards)


def start(code: str) -> tuple["subprocess.Popen[str]", str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    run = subprocess.Popen(command, stdout=pipe, text=True, env=environment)
    assert run.stdout
    return run, run.stdout.readline()


def test_a_run_finds_and_awaits_orphans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, pid = start(PARENT)
    child = psutil.Process(int(pid))
    # Popen returns once exec closes its pipe: before the program has its environment.
    wait_for(child.environ)
    # A job of a living run is not an orphan, and a reused process id is not a run.
    assert find_orphans() == {}
    assert not run_lock._is_run_of(run.pid, psutil.Process())
    run.kill()
    run.communicate()
    assert find_orphans() == {child.pid: "sleep 600"}
    # A job of another folder, machine or container is not ours.
    (elsewhere := folder / "elsewhere").mkdir()
    (numbering := folder / "numbering").symlink_to("pid:[1]")
    for name, other in (("_place", lambda: "n/"), ("NUMBERING", numbering)):
        with monkeypatch.context() as patched:
            patched.setattr(run_lock, name, other)
            assert find_orphans() == {}
    with monkeypatch.context() as patched:
        patched.chdir(elsewhere)
        assert find_orphans() == {}

    def end_while_waited_for(_: float) -> None:
        child.kill()
        wait_for(lambda: not is_running(child))

    monkeypatch.setattr(run_lock.time, "sleep", end_while_waited_for)
    hold_experts([])
    assert find_orphans() == {}
    told = capsys.readouterr().err
    assert f"waiting for process {child.pid} (sleep 600)" in told and told.count("\n") == 1


def write_squeue(script: str) -> None:
    program = Path("squeue")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def hold_for_slurm(name: str | None) -> None:
    """Lock an expert for a run that ends at once, which releases the locks."""
    try:
        hold_experts([job(expert="a")], slurm_run=name)
    finally:
        while run_lock._held:
            run_lock._held.pop().close()


def slurm_runs() -> list[str]:
    found: list[str] = json.loads((EXPERT_LOCKS / "a.lock").read_text())["slurm_runs"]
    return found


def test_a_run_waits_for_the_jobs_of_the_previous_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_squeue("exit 1")
    hold_for_slurm("first")
    assert capsys.readouterr().err == "", "there was no run before: nothing is asked"
    write_squeue('echo "$@" >> asked; [ $(wc -l < asked) = 3 ] || printf "8\\n7\\n"')
    hold_for_slurm("second")
    told = capsys.readouterr().err
    assert "waiting for 7 8; to stop them sooner: scancel 7 8" in told and told.count("\n") == 1
    asked = Path("asked").read_text().splitlines()
    assert len(asked) == 3 and all(line.endswith("--name=first") for line in asked)
    assert slurm_runs() == ["second"]
    # A failing or missing squeue says nothing about jobs.
    write_squeue("[ -e failed ] || { touch failed; echo no controller >&2; exit 1; }")
    hold_for_slurm(None)
    assert "squeue failed (no controller)" in capsys.readouterr().err
    assert slurm_runs() == []
    hold_for_slurm("third")
    monkeypatch.setenv("PATH", "/nowhere")
    hold_for_slurm(None)
    assert "no squeue here; make sure" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_while_waiting_leaves_the_jobs_to_the_next(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    hold_for_slurm("first")
    write_squeue("echo 7")
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: os.kill(os.getpid(), number))
    with pytest.raises(
        SystemExit, match=f"error: {number.name} while .*: scancel 7, and run again"
    ):
        hold_for_slurm("second")
    assert slurm_runs() == ["first", "second"]


def test_waiting_ends_after_a_day(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_for_slurm("first")
    write_squeue("echo 7")
    naps: list[float] = []
    clock = SimpleNamespace(sleep=naps.append, monotonic=lambda: 6 * 3600.0 * len(naps))
    monkeypatch.setattr(run_lock, "time", clock)
    with pytest.raises(SystemExit, match="scancel 7, and run again; gave up after 24 h"):
        hold_for_slurm(None)
    assert capsys.readouterr().err.count("scancel 7; Ctrl-C ends the wait\n") == 4


def test_slurm_without_sbatch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run: Any = SimpleNamespace(
        execution_settings=SimpleNamespace(keep_incomplete=False),
        executor_plugin=SimpleNamespace(name="slurm"),
    )
    with pytest.raises(SystemExit, match="sbatch, which is not found here; run Snakemake on a log"):
        _before_first_job(run)


# Runs a shell with a child process; both record their ids.
RUN = """
import sys
from expertflow.core.process import run_stoppable
run_stoppable(["bash", "-c", sys.argv[1]], patience_s=0.5)
"""
DEAF = "trap '' INT TERM; "
SHELL = "sleep 600 & echo $! > child; echo $$ > leader.new; mv leader.new leader; wait; sleep 600"


@pytest.mark.parametrize(
    ("number", "shell"),
    [(signal.SIGTERM, DEAF + SHELL), (signal.SIGINT, SHELL), (signal.SIGHUP, SHELL)],
)
def test_a_stop_leaves_no_process(tmp_path: Path, number: signal.Signals, shell: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    process = subprocess.Popen([sys.executable, "-c", RUN, shell], cwd=tmp_path, env=environment)
    wait_for((tmp_path / "leader").exists, during=process)
    pids = [int((tmp_path / name).read_text()) for name in ("leader", "child")]
    assert all(map(is_running, pids))
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 128 + number
    wait_for(lambda: not any(map(is_running, pids)))
