"""Run lines in turns on a shared machine, and measure commands with all the processes they start.

Each repeat runs every line once, and every other repeat in the opposite order, so that a machine
that slows down or warms up affects all of them equally. Ratios are taken within a repeat.

Memory is sampled: the sum of PSS (each page shared by n processes counts 1/n in each, mapped files
included) over all descendants, from the kernel's ``smaps_rollup``. Orphans are
adopted, so that the CPU time of a library's fork server counts too.
"""

import ctypes
import os
import re
import resource
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

SAMPLE_EVERY_S = 0.05
PR_SET_CHILD_SUBREAPER = 36
# The first line of an error in the output of Snakemake, of Python, and of our programs.
ERROR = re.compile(r"\S*(Error|Exception)\b|error:")
Row = dict[str, Any]
T = TypeVar("T")


class Failed(Exception):
    """A measured program ended with an error."""


def run_in_turns(
    lines: Mapping[str, Callable[[int], T]],
    n_repeats: int,
    problems: dict[str, str],
    *,
    required: Sequence[str] = (),
) -> dict[str, dict[int, T]]:
    """Run every line in each repeat, e.g. ours, peer, peer, ours; return its runs by repeat.

    A line with a problem is not run; one that fails gets a problem.

    Raises:
        Failed: a required line failed.
    """
    runs: dict[str, dict[int, T]] = {line: {} for line in lines}
    for repeat in range(n_repeats):
        for line in list(lines)[:: -1 if repeat % 2 else 1]:
            if line in problems:
                continue
            try:
                runs[line][repeat] = lines[line](repeat)
            except Failed as error:
                if line in required:
                    raise
                problems[line] = str(error)
    return runs


def spread(values: Sequence[float]) -> Row:
    """Return the median with the lowest and highest value."""
    median = statistics.median(values)
    return {"median": median, "least": min(values), "most": max(values), "n": len(values)}


def ratios(first: dict[int, float], second: dict[int, float]) -> Row | None:
    """Compare two lines by the repeats that both have; null if there are none."""
    both = sorted(first.keys() & second.keys())
    return spread([first[repeat] / second[repeat] for repeat in both]) if both else None


def format_spread(value: Row | None) -> str:
    return f"{value['median']:.2f} ({value['least']:.2f}-{value['most']:.2f})" if value else "-"


def run(command: list[str], **place: Any) -> None:
    """Run a command quietly; ``place`` is passed to ``subprocess.run``.

    Raises:
        Failed: the command failed; with the first line of its error, or else its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, **place)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        reason = next((line for line in lines if ERROR.match(line)), lines[-1])
        program = next(word for word in command[1:] if not word.startswith("-"))
        raise Failed(f"{Path(program).stem}: {reason.strip()[:300]}")


def measure(command: list[str], **place: Any) -> dict[str, float]:
    """Run a command with all the processes it starts; return their wall and CPU seconds.

    Raises:
        Failed: as ``run``.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before_s, start = children_cpu_s(), time.perf_counter()
    run(command, **place)
    wall_s = time.perf_counter() - start
    # Orphans of processes that have ended.
    with suppress(ChildProcessError):
        while True:
            os.wait3(0)
    return {"wall_s": wall_s, "cpu_s": children_cpu_s() - before_s}


def children_cpu_s() -> float:
    """Return the CPU time of all children that have ended, and of their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def sample_memory() -> Iterator[list[int]]:
    """Sample the sum of the descendants' PSS during a block, in bytes."""
    sums, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            sums.append(sum(map(pss_bytes, psutil.Process().children(recursive=True))))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield sums
    finally:
        done.set()
        thread.join()


def pss_bytes(process: psutil.Process) -> int:
    """Return a process's proportional share of memory; 0 if it has ended."""
    try:
        pss: int = process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
    return pss
