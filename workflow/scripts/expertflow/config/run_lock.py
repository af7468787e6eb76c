"""Lock experts: one run at a time makes one, and none while jobs of a killed run still write.

Snakemake's own lock outlives a killed Snakemake, and the first of two runs to end removes both
runs' locks; so the profiles turn it off. These locks die with their process.
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

# The page of all experts is locked like an expert.
INDEX = "index"
# Inside a container, processes are numbered separately.
NUMBERING = Path("/proc/self/ns/pid")
POLL_S, SLURM_POLL_S, TOLD_EVERY_S = 0.5, 10.0, 60.0
# As long as an unplanned training may take.
LIMIT_S = 24 * 3600
ANSWER_S = 60
_held: list[IO[str]] = []


def sign_jobs() -> None:
    """Pass this run's process, PID namespace and folder to jobs in the environment."""
    os.environ[RUN] = f"{os.getpid()} {_place()} {Path.cwd()}"


def _place() -> str:
    numbering = NUMBERING.readlink() if NUMBERING.is_symlink() else ""
    return f"{socket.gethostname()}/{numbering}"


def hold_experts(jobs: Iterable[Any], *, slurm_run: str | None = None) -> None:
    """Lock the experts that this run makes until its process ends; then wait for orphaned jobs.

    ``slurm_run`` names this run's jobs on Slurm. Ends the run if another one is making an expert.
    """
    own = [] if slurm_run is None else [slurm_run]
    streams, before = [], set()
    for expert in sorted({job.wildcards_dict.get("expert", INDEX) for job in jobs}):
        # In sorted order, so that one of two runs of the same experts gets all of them.
        stream = _open(expert)
        if try_lock(stream) == "held":
            known = read_holder(stream)
            who = f", process {known['pid']} on {known['host']}" if known else ""
            fail(f"{expert} is being made by another run{who}; wait for it, or stop it")
        left = read_holder(stream).get("slurm_runs", [])
        # If this run is killed while it waits, the next one has to wait for the same jobs.
        sign_lock(stream, slurm_runs=[*left, *own])
        _held.append(stream)
        streams.append(stream)
        before.update(left)
    # First, because those on this machine would be found as processes, too.
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
    """Wait until there is nothing to describe; end the run on a signal, or after ``LIMIT_S``."""
    start_s, noted_s = time.monotonic(), None
    # Snakemake's own SIGTERM handler only notes it for its scheduler, which is not running yet.
    with record_signals() as received:
        while text := describe():
            waited_s = time.monotonic() - start_s
            if received:
                name = signal.Signals(received[0]).name
                fail(f"{name} while waiting; {text}, and run again")
            if waited_s >= LIMIT_S:
                fail(f"{text}, and run again; gave up after {waited_s / 3600:.0f} h")
            if noted_s is None or waited_s - noted_s >= TOLD_EVERY_S:
                note(f"{text}; Ctrl-C ends the wait")
                noted_s = waited_s
            time.sleep(poll_s)


def _orphans_left() -> str:
    found = find_orphans()
    if not found:
        return ""
    pids = " ".join(map(str, sorted(found)))
    return (
        f"jobs of a killed run are still running: waiting for process {pids}"
        f" ({found[min(found)]}); to stop them sooner: kill {pids}"
    )


def find_orphans() -> dict[int, str]:
    """Find this folder's jobs whose run has ended; return the command of each process."""
    found, place = {}, _place()
    for process in psutil.process_iter():
        # It has just ended, or belongs to another user.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            pid, _, rest = process.environ().get(RUN, "").partition(" ")
            # Another live run in the same folder makes other experts.
            if rest == f"{place} {Path.cwd()}" and not _is_run_of(int(pid), process):
                found[process.pid] = " ".join(process.cmdline()[:2])
    return found


def _is_run_of(pid: int, job: psutil.Process) -> bool:
    # A reused process ID belongs to a process younger than the job.
    try:
        return pid == os.getpid() or psutil.Process(pid).create_time() <= job.create_time()
    except psutil.NoSuchProcess:
        return False


def _wait_for_slurm(names: Sequence[str]) -> None:
    # Slurm jobs outlive the Snakemake that submitted them, and write the same files as this run.
    if not names:
        return
    if shutil.which("squeue") is None:
        note(
            "the previous run was killed, or is still running, on Slurm, and there is no squeue"
            " here; make sure that none of its jobs is left"
        )
        return
    _wait_while(lambda: _slurm_jobs_left(names), SLURM_POLL_S)


def _slurm_jobs_left(names: Sequence[str]) -> str:
    command = ["squeue", "--noheader", "--format=%A", f"--name={','.join(names)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"squeue did not answer within {ANSWER_S} s; asking again for jobs of a killed run"
    if done.returncode:
        return f"squeue failed ({done.stderr.strip()}); asking again for jobs of a killed run"
    ids = " ".join(sorted(set(done.stdout.split()), key=int))
    if not ids:
        return ""
    return (
        f"jobs of a killed run are still in Slurm: waiting for {ids}; to stop them"
        f" sooner: scancel {ids}"
    )
