"""profiles/cluster-generic, through a made-up scheduler: a job that is killed is resumed."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support import PATIENCE_S, ROOT, is_running, wait_for
from workflow_space import SNAKEMAKE, Workspace, let_trainings_rest, manifest

pytestmark = [pytest.mark.chain, pytest.mark.long, pytest.mark.extra("slurm")]
PROFILE = ROOT / "profiles" / "cluster-generic"
TARGET = "results/tiny/training.json"
N_STEPS = 40


@dataclass(frozen=True)
class Scheduler:
    folder: Path

    def command(self, verb: str) -> Path:
        """Write a program that does one thing, as a site would install it."""
        program = self.folder / verb
        fake = Path(__file__).with_name("fake_scheduler.py")
        # Without what is installed Python starts at once; Snakemake gives "cancel" 2 seconds.
        words = [sys.executable, "-I", "-S", str(fake), verb, str(self.folder)]
        asked = shlex.quote(str(self.folder))
        # Noted and told by the shell, as it starts at once; Python sees to those that stay.
        told = f'touch {asked}/$n.cancelled; kill -s TERM -- "-$(cat {asked}/$n.pid)"'
        first = f'for n in "$@"; do {told}; done\n' if verb == "cancel" else ""
        lines = f'{first}exec {shlex.join(words)} "$@"\n'
        program.write_text(f"#!/bin/sh\n{lines}")
        program.chmod(0o755)
        return program

    def job_of(self, rule: str) -> str | None:
        """Return the number of the first job of a rule that has started."""
        for script in sorted(self.folder.glob("*.job"), key=lambda path: int(path.stem)):
            if f'"rule": "{rule}"' in script.read_text() and script.with_suffix(".pid").exists():
                return script.stem
        return None

    def alive(self) -> list[str]:
        """List the jobs whose process group still holds a process; one that ended is none."""
        groups = set()
        for process in filter(is_running, psutil.process_iter()):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(process.pid))
        return [p.stem for p in self.folder.glob("*.pid") if int(p.read_text()) in groups]

    def wait_for_the_end(self) -> None:
        wait_for(lambda: not self.alive(), said="a job outlived Snakemake")


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    folder = tmp_path / "scheduler"
    folder.mkdir()
    return Scheduler(folder)


@pytest.fixture
def longer(space: Workspace) -> Workspace:
    """Return a finished workspace whose training became longer, and rests when it has saved."""
    let_trainings_rest(space)
    space.write_manifest("tiny", manifest(max_steps=N_STEPS, save_steps=1))
    (space.root / "rest-0").touch()
    return space


# A Snakemake that stays between two questions to the scheduler as soon as there is a checkpoint.
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


def start(space: Workspace, scheduler: Scheduler, *program: str | Path) -> "subprocess.Popen[str]":
    command = [*(program or [SNAKEMAKE]), "--workflow-profile", PROFILE, TARGET]
    for verb in ("submit", "status", "cancel"):
        command += [f"--cluster-generic-{verb}-cmd", scheduler.command(verb)]
    command += ["--seconds-between-status-checks", "1", "--max-status-checks-per-second", "10"]
    return subprocess.Popen(
        [*map(str, command)],
        cwd=space.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_training(
    space: Workspace, scheduler: Scheduler, process: subprocess.Popen[str]
) -> str:
    before = set(space.root.glob("state/tiny/*/checkpoints/step-*"))
    wait_for(
        lambda: set(space.root.glob("state/tiny/*/checkpoints/step-*")) - before,
        said="no state was written",
        during=process,
    )
    number = scheduler.job_of("train_expert")
    assert number is not None
    return number


def test_a_killed_job_is_resumed_and_ends_with_the_same_weights(
    longer: Workspace, scheduler: Scheduler, tmp_path: Path
) -> None:
    process = start(longer, scheduler)
    first = wait_for_training(longer, scheduler, process)
    subprocess.run([scheduler.folder / "cancel", first], check=True)
    (longer.root / "rest-0").unlink()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output[-3000:]
    assert (scheduler.folder / f"{first}.code").read_text() != "0"
    straight = longer.copy(tmp_path / "straight")
    shutil.rmtree(straight.root / "state" / "tiny")
    (straight.root / TARGET).unlink()
    straight.run(TARGET)
    resumed, expected = longer.record("training.json"), straight.record("training.json")
    assert len(resumed["resumed_at_steps"]) == 1 and 0 < resumed["resumed_at_steps"][0] < N_STEPS
    assert expected["resumed_at_steps"] == []
    assert resumed["weights_sha256"] == expected["weights_sha256"]
    # What copies a log ends after what it copies.
    scheduler.wait_for_the_end()


def test_stopping_snakemake_cancels_its_jobs(longer: Workspace, scheduler: Scheduler) -> None:
    """Stopped between two questions: while it asks for states Snakemake knows of no job."""
    longer.run("results/tiny/staging.json")
    shutil.rmtree(longer.root / "state" / "tiny")
    process = start(longer, scheduler, sys.executable, "-c", ASLEEP)
    number = wait_for_training(longer, scheduler, process)
    wait_for((longer.root / "asleep").exists, during=process)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, output[-3000:]
    assert (scheduler.folder / f"{number}.cancelled").exists(), output[-3000:]
    scheduler.wait_for_the_end()
    assert not (longer.root / TARGET).exists()


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
