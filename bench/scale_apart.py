"""Run something in a process of its own: what it took, and the memory that it added."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Failed(Exception):
    """A measured process ended with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """What a piece of work took. ``peak_bytes`` counts from what the process held before it."""

    seconds: float
    cpu_s: float
    peak_bytes: int
    value: Any


def apart(work: Callable[[], Any]) -> Took:
    """Do some work in a forked process and say what it took.

    Raises:
        Failed: it raised, or the process was killed.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run, args=(work, sender))
    process.start()
    sender.close()
    try:
        seconds, cpu_s, peak_bytes, value = receiver.recv()
    except EOFError:
        process.join()
        raise Failed(f"the process ended with {process.exitcode}; see above") from None
    process.join()
    return Took(seconds=seconds, cpu_s=cpu_s, peak_bytes=peak_bytes, value=value)


def _run(work: Callable[[], Any], sender: Connection) -> None:
    # Sets the highest resident set back to what is resident now.
    REFERENCES.write_text("5")
    before = _resident("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    value = work()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    sender.send((seconds, cpu_s, max(0, _resident("VmHWM") - before), value))


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
