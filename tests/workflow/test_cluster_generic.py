"""profiles/cluster-generic, with a mock scheduler: a killed job is resumed."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import PATIENCE_S, ROOT, is_running, wait_for
from workflow_space import SNAKEMAKE, Workspace, let_trainings_rest, manifest

pytestmark = [pytest.mark.chain, pytest.mark.long, pytest.mark.extra("slurm")]
PROFILE = ROOT / "profiles" / "cluster-generic"
TARGET = "results/tiny/training.json"
N_STEPS = 10

# The programs of a scheduler that starts every job at once, in its own process group. They
# are shell scripts, which start quickly: Snakemake allows "cancel" 2 seconds.
PROGRAMS = {
    "submit": """
        n=$(($(ls | grep -c 'job$') + 1))
        basename "$1" > $n.name
        cp "$1" $n.job
        run='(cd "$1"; exec setsid sh "$OLDPWD/$0.job") & echo $! > $0.part; mv $0.part $0.pid
            wait $!; echo $? > $0.part; mv $0.part $0.code'
        setsid sh -c "$run" $n "$OLDPWD" > $n.log 2>&1 &
        echo $n
        """,
    "status": """
        [ -e $1.code ] || exec echo running
        [ "$(cat $1.code)" = 0 ] && echo success || echo failed
        """,
    # SIGTERM, and after a grace time of 20 seconds SIGKILL.
    "cancel": """
        for n in "$@"; do
            touch $n.cancelled
            group=$(cat $n.pid)
            kill -s TERM -- -$group
            (for _ in $(seq 200); do sleep 0.1; kill -s 0 -- -$group || exit; done
                kill -s KILL -- -$group) > $n.end 2>&1 &
        done
        """,
}


@pytest.fixture
def scheduler(tmp_path: Path) -> Path:
    """Return the folder of a scheduler with its programs, as installed by a site."""
    folder = tmp_path / "scheduler"
    folder.mkdir()
    for verb, text in PROGRAMS.items():
        (folder / verb).write_text(f"#!/bin/sh\ncd {shlex.quote(str(folder))}{text}")
        (folder / verb).chmod(0o755)
    return folder


def last_training(scheduler: Path) -> Path:
    jobs = sorted(scheduler.glob("*.job"), key=lambda path: int(path.stem))
    return [path for path in jobs if '"rule": "train_expert"' in path.read_text()][-1]


def alive(scheduler: Path) -> list[str]:
    """List the jobs whose process group still has a running process."""
    groups = set()
    for process in filter(is_running, psutil.process_iter()):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(process.pid))
    return [path.stem for path in scheduler.glob("*.pid") if int(path.read_text()) in groups]


# A Snakemake that stays between two queries of the scheduler once there is a checkpoint.
ASLEEP = """
import asyncio
from pathlib import Path

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

sleep = RemoteExecutor.sleep


async def stay_asleep(executor):
    while executor.wait and list(Path().glob("state/tiny/*/checkpoints/step-*")):
        Path("asleep").touch()
        await asyncio.sleep(0.1)
    await sleep(executor)


RemoteExecutor.sleep = stay_asleep
main()
"""


def start_training(space: Workspace, scheduler: Path, *program: object) -> "subprocess.Popen[str]":
    """Start a Snakemake whose training pauses after a save."""

    def checkpoints() -> set[Path]:
        return set(space.root.glob("state/tiny/*/checkpoints/step-*"))

    (space.root / "rest-0").touch()
    before = checkpoints()
    command = [*(program or [SNAKEMAKE]), "--workflow-profile", PROFILE, TARGET]
    for verb in PROGRAMS:
        command += [f"--cluster-generic-{verb}-cmd", scheduler / verb]
    command += ["--seconds-between-status-checks", "1", "--max-status-checks-per-second", "10"]
    process = space.start(*command)
    wait_for(lambda: checkpoints() - before, message="no state was written", during=process)
    return process


def test_jobs_end_with_snakemake_and_killed_ones_resume(space: Workspace, scheduler: Path) -> None:
    let_trainings_rest(space)
    space.write_manifest("tiny", manifest(max_steps=N_STEPS, save_steps=1))
    shutil.rmtree(space.root / "state" / "tiny")
    space.run("results/tiny/staging.json")

    # Stopped between two queries: while it queries states, Snakemake knows of no job.
    process = start_training(space, scheduler, sys.executable, "-c", ASLEEP)
    wait_for((space.root / "asleep").exists, during=process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, output[-3000:]
    assert last_training(scheduler).with_suffix(".cancelled").exists(), output[-3000:]
    wait_for(lambda: not alive(scheduler), message="a job outlived Snakemake")
    assert not (space.root / TARGET).exists()

    process = start_training(space, scheduler)
    killed = last_training(scheduler)
    assert killed.with_suffix(".name").read_text().startswith("tiny.train_expert.")
    subprocess.run([scheduler / "cancel", killed.stem], check=True)
    (space.root / "rest-0").unlink()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output[-3000:]
    assert killed.with_suffix(".code").read_text() != "0\n"
    first, second = space.record("training.json")["resumed_at_steps"]
    assert 0 < first < second < N_STEPS
    wait_for(lambda: not alive(scheduler), message="a job outlived Snakemake")


@pytest.mark.parametrize(
    ("scheduler_name", "program", "answer", "code", "expected"),
    [
        ("pbs", "qstat", "    job_state = R", 0, "running"),
        ("pbs", "qstat", "    job_state = F\n    Exit_status = 0", 0, "success"),
        ("pbs", "qstat", "    job_state = F\n    Exit_status = 271", 0, "failed"),
        ("pbs", "qstat", "qstat: Unknown Job Id 7", 153, "failed"),
        ("pbs", "qstat", "Connection refused", 111, "running"),
        ("lsf", "bjobs", "PEND", 0, "running"),
        ("lsf", "bjobs", "DONE", 0, "success"),
        ("lsf", "bjobs", "EXIT", 0, "failed"),
        ("lsf", "bjobs", "LSF is down", 255, "running"),
        ("sge", "qacct", "failed       0\nexit_status  0", 0, "success"),
        ("sge", "qacct", "failed       0\nexit_status  143", 0, "failed"),
        ("sge", "qacct", "failed       100 : assumedly after job\nexit_status  0", 0, "failed"),
        ("sge", "qacct", "error: job id 7 not found", 1, "running"),
    ],
)
def test_a_status_script_reads_what_its_scheduler_says(
    tmp_path: Path, scheduler_name: str, program: str, answer: str, code: int, expected: str
) -> None:
    programs = {"qstat": "exit 1", program: f"printf '%s\\n' {shlex.quote(answer)}; exit {code}"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = PROFILE / f"status_{scheduler_name}.sh"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([script, "7"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
