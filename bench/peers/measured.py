"""Measure a command with all the processes it starts: wall time, CPU time, peak memory.

Memory is sampled: the sum of PSS (each page shared by n processes counts 1/n in each, mapped files
included) over all descendants, from the kernel's ``smaps_rollup``. Orphans are
adopted, so that the CPU time of a library's fork server counts too.
"""

import ctypes
import os
import resource
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_EVERY_S = 0.05
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Time and memory of a job. Bytes are the peak PSS of the entire process tree."""

    wall_s: float
    cpu_s: float
    peak_tree_bytes: int


def reap_orphans() -> None:
    """Wait for orphans of processes that have ended."""
    with suppress(ChildProcessError):
        while True:
            os.wait3(0)


class Failed(Exception):
    """A measured program ended with an error."""


def measure(command: list[str], log: Path) -> Measured:
    """Run a command with all the processes it starts; return its time and memory.

    Raises:
        Failed: the command failed; with its last line.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = cpu_s()
    with _Sampler() as sampler:
        start = time.perf_counter()
        with log.open("wb") as stream:
            done = subprocess.run(command, stdout=stream, stderr=stream, check=False)
        wall_s = time.perf_counter() - start
    reap_orphans()
    if done.returncode:
        output = log.read_text(errors="replace").strip().splitlines()
        raise Failed(f"{Path(command[1]).stem}: {output[-1] if output else 'no output'}")
    return Measured(
        wall_s=wall_s,
        cpu_s=cpu_s() - before,
        peak_tree_bytes=sampler.peak_bytes,
    )


def cpu_s() -> float:
    """Return the CPU time of all children that have ended, and of their children."""
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
            total = sum(map(pss_bytes, psutil.Process().children(recursive=True)))
            self.peak_bytes = max(self.peak_bytes, total)


def pss_bytes(process: psutil.Process) -> int:
    """Return a process's proportional share of memory; 0 if it has ended."""
    try:
        pss: int = process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
    return pss
