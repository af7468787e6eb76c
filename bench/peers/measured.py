"""Measure a job with all the processes it starts: wall time, CPU time, peak memory.

Memory is sampled: the sum of PSS (each page shared by n processes counts 1/n in each, mapped files
included) over all descendants, from the kernel's ``smaps_rollup``. Beside it stands the largest
resident set of any one process, as the kernel kept it. Orphans are adopted, so that the CPU time
of a library's fork server counts too.
"""

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SAMPLE_EVERY_S = 0.05
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a job took. Bytes are the peak of the whole tree's PSS, and of any one process's RSS."""

    wall_s: float
    cpu_s: float
    peak_tree_bytes: int
    peak_process_bytes: int


class Processes:
    """Runs commands, some at a time, and remembers the largest resident set of any."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.peak_process_bytes = 0

    def run(self, *commands: list[str], at_once: int = 1) -> None:
        """Run commands to their end; one that fails ends the benchmark with its last line."""
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self._run_one, commands))

    def _run_one(self, command: list[str]) -> None:
        with self.log.open("ab") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream)
        self._note(*os.wait4(process.pid, 0)[1:], process)

    def _note(
        self, status: int, usage: resource.struct_rusage, process: subprocess.Popen[bytes]
    ) -> None:
        process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_process_bytes = max(self.peak_process_bytes, usage.ru_maxrss * 1024)
        if process.returncode:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise Failed(f"{Path(str(process.args[1])).stem}: {said[-1] if said else 'no output'}")

    def reap(self) -> None:
        """Wait for the orphans of what has ended."""
        while True:
            try:
                usage = os.wait3(0)[2]
            except ChildProcessError:
                return
            self.peak_process_bytes = max(self.peak_process_bytes, usage.ru_maxrss * 1024)


class Failed(Exception):
    """A measured program ended with an error."""


def measure(job: Callable[[Processes], None], log: Path) -> Measured:
    """Run a job that starts processes; say what it took.

    Raises:
        Failed: one of the processes did.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    processes = Processes(log)
    before = cpu_s()
    with _Sampler() as sampler:
        start = time.perf_counter()
        job(processes)
        wall_s = time.perf_counter() - start
    processes.reap()
    return Measured(
        wall_s=wall_s,
        cpu_s=cpu_s() - before,
        peak_tree_bytes=sampler.peak_bytes,
        peak_process_bytes=processes.peak_process_bytes,
    )


def cpu_s() -> float:
    """Give the CPU time of all children that have ended, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _Sampler(threading.Thread):
    """Keeps the highest sum of the descendants' PSS."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stop_now = threading.Event()

    def __enter__(self) -> "_Sampler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_now.set()
        self.join()

    def run(self) -> None:
        while not self._stop_now.wait(SAMPLE_EVERY_S):
            total = sum(map(pss_bytes, descendants(os.getpid())))
            self.peak_bytes = max(self.peak_bytes, total)


def descendants(pid: int) -> list[int]:
    """List the processes below one."""
    children: dict[int, list[int]] = {}
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                stat = Path(folder.path, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The name, in brackets, may hold blanks; behind it come the state and the parent.
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def pss_bytes(pid: int) -> int:
    """Give a process's proportional share of memory; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit("a module of bench/tokenise_pack.py")
