"""One run at a time makes an expert, and none while jobs of a killed run still write.

Snakemake's own lock outlives a Snakemake that was killed, and the first of two runs to end takes
both runs' locks away; so the profiles turn it off. These locks die with their process.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from expertflow.config.guard import fail, note
from expertflow.core.attempts import RUN
from expertflow.core.locks import EXPERT_LOCKS, read_holder, sign_lock, try_lock
from expertflow.core.process import record_signals

# The page over all experts is made by a run like an expert.
INDEX = "index"
# Inside of a container processes are numbered anew.
NUMBERING = Path("/proc/self/ns/pid")
POLL_S, SLURM_POLL_S, TOLD_EVERY_S = 0.5, 10.0, 60.0
# As long as an unplanned training may take.
LIMIT_S = 24 * 3600
ANSWER_S = 60
_held: list[IO[str]] = []


def sign_jobs() -> None:
    """Pass this run's process, PID namespace and folder to jobs by the environment."""
    os.environ[RUN] = f"{os.getpid()} {_place()} {Path.cwd()}"


def _place() -> str:
    numbering = NUMBERING.readlink() if NUMBERING.is_symlink() else ""
    return f"{socket.gethostname()}/{numbering}"


def hold_experts(jobs: Iterable[Any], *, slurm_run: str | None = None) -> None:
    """Hold the experts that this run makes until its process ends; then wait for find_orphans.

    ``slurm_run`` names this run's jobs on Slurm. Ends the run if another one makes an expert.
    """
    own = [] if slurm_run is None else [slurm_run]
    streams, before = [], set()
    for expert in sorted({job.wildcards_dict.get("expert", INDEX) for job in jobs}):
        # In sorted order, so that of two runs of the same experts one gets all.
        stream = _open(expert)
        if try_lock(stream) == "held":
            known = read_holder(stream)
            who = f", process {known['pid']} on {known['host']}" if known else ""
            fail(f"{expert} is being made by another run{who}; wait for it, or stop it")
        left = read_holder(stream).get("slurm_runs", [])
        # Whoever comes after a run that is killed while it waits has to wait for the same jobs.
        sign_lock(stream, slurm_runs=[*left, *own])
        _held.append(stream)
        streams.append(stream)
        before.update(left)
    # First, as those that run on this machine would be found as processes, too.
    _wait_for_slurm(sorted(before))
    _wait_while(_orphans_left, POLL_S)
    for stream in streams:
        sign_lock(stream, slurm_runs=own)


@contextlib.contextmanager
def try_hold(expert: str) -> Iterator[bool]:
    with _open(expert) as stream:
        yield try_lock(stream) != "held"


def _open(expert: str) -> IO[str]:
    EXPERT_LOCKS.mkdir(parents=True, exist_ok=True)
    return (EXPERT_LOCKS / f"{expert}.lock").open("a+", encoding="utf-8")


def _wait_while(describe: Callable[[], str], poll_s: float) -> None:
    """Wait until there is nothing to describe; end the run at a signal, or after ``LIMIT_S``."""
    start_s, told_s = time.monotonic(), None
    # Snakemake's own handler of SIGTERM only notes it for its scheduler, which does not run yet.
    with record_signals() as came:
        while text := describe():
            waited_s = time.monotonic() - start_s
            if came:
                name = signal.Signals(came[0]).name
                fail(f"{name} while waiting; {text}, and run again")
            if waited_s >= LIMIT_S:
                fail(f"{text}, and run again; it was waited for {waited_s / 3600:.0f} h")
            if told_s is None or waited_s - told_s >= TOLD_EVERY_S:
                note(f"{text}; Ctrl-C ends the wait")
                told_s = waited_s
            time.sleep(poll_s)


def _orphans_left() -> str:
    found = find_orphans()
    if not found:
        return ""
    pids = " ".join(map(str, sorted(found)))
    return (
        f"jobs of a run that was killed are still at work: waiting for process {pids}"
        f" ({found[min(found)]}); to end them sooner: kill {pids}"
    )


def find_orphans() -> dict[int, str]:
    """Find jobs of this folder whose run is gone; return what each process runs."""
    found, place = {}, _place()
    for process in psutil.process_iter():
        # It ends while it is looked at, or is somebody else's.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            pid, _, rest = process.environ().get(RUN, "").partition(" ")
            # Another run in the same folder makes other experts, and lives.
            if rest == f"{place} {Path.cwd()}" and not _is_run_of(int(pid), process):
                found[process.pid] = " ".join(process.cmdline()[:2])
    return found


def _is_run_of(pid: int, job: psutil.Process) -> bool:
    # A number that was given away again is a process younger than the job.
    try:
        return pid == os.getpid() or psutil.Process(pid).create_time() <= job.create_time()
    except psutil.NoSuchProcess:
        return False


def slurm_run_name(workflow: Any) -> str | None:
    """Return the name that the Slurm plugin gives all jobs of this run; null with others."""
    if workflow.executor_plugin.name != "slurm":
        return None
    # The plugin tells its name nowhere else before it submits.
    name: str = workflow.scheduler._executor.run_uuid
    return name


def _wait_for_slurm(names: Sequence[str]) -> None:
    # Slurm's jobs outlive the Snakemake that submitted them, and write what this run would.
    if not names:
        return
    if shutil.which("squeue") is None:
        note(
            "the run before this one was killed, or is at work, on Slurm, and there is no squeue"
            " here to ask; see that none of its jobs is left"
        )
        return
    _wait_while(lambda: _slurm_jobs_left(names), SLURM_POLL_S)


def _slurm_jobs_left(names: Sequence[str]) -> str:
    command = ["squeue", "--noheader", "--format=%A", f"--name={','.join(names)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"squeue did not answer in {ANSWER_S} s; it is asked for jobs of a killed run again"
    if done.returncode:
        return f"squeue failed ({done.stderr.strip()}); it is asked for jobs of a killed run again"
    ids = " ".join(sorted(set(done.stdout.split()), key=int))
    if not ids:
        return ""
    return (
        f"jobs of a run that was killed are still with Slurm: waiting for {ids}; to end them"
        f" sooner: scancel {ids}"
    )
