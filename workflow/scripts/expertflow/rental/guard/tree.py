"""Who of a command's processes is told to stop, and in which order.

Snakemake first: told to end, it starts no job and no retry any more, and waits for those at work.
Then the jobs' own processes, which save and end. The shells and pipes around them are left alone:
they end with what they serve, and a shell that ends before its trainer makes Snakemake delete what
the trainer still writes, a log pipe that ends makes it fail. What a job has started (a launcher's
trainers, a loader's workers) is the job's own to end.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
from msgspec import Struct, field

from expertflow.core.records import Record

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox"})
PIPES = frozenset({"tee", "cat"})


class Told(Record, frozen=True, kw_only=True):
    """A process that is to be told to stop; ``first`` before all others."""

    process: psutil.Process
    first: bool


class Stopper(Struct):
    """Tells processes to stop, each once, while new ones may come."""

    root: int | None
    told: set[psutil.Process] = field(default_factory=set)
    seen: set[psutil.Process] = field(default_factory=set)

    def tell(self, *, first: bool) -> int:
        """Send SIGTERM to those of the first rank, or to all the others; give how many live.

        A shell that starts something new after the stop is going on with its script: told, too.
        """
        living = living_below()
        for one in self._wanted(living):
            if one.first == first and one.process not in self.told:
                self.told.add(one.process)
                send(one.process, signal.SIGTERM)
        self.seen |= set(living)
        return len(living)

    def _wanted(self, living: list[psutil.Process]) -> Iterator[Told]:
        stopping = bool(self.told)
        for process in psutil.Process().children():
            yield from self._below(process, stopping, set(living))

    def _below(
        self, process: psutil.Process, stopping: bool, living: set[psutil.Process]
    ) -> Iterator[Told]:
        if process not in living:
            return
        is_root = process.pid == self.root
        children = _children(process)
        name, arguments = _identity(process)
        passes_on = name in SHELLS or _is_snakemake(arguments)
        passes_on = passes_on or any(_is_snakemake(_identity(c)[1]) for c in _all_below(process))
        if is_root or _is_snakemake(arguments):
            yield Told(process=process, first=True)
        elif name in SHELLS:
            goes_on = stopping and any(child not in self.seen for child in children)
            if goes_on or not children:
                yield Told(process=process, first=False)
        elif name not in PIPES and not passes_on:
            yield Told(process=process, first=False)
        if passes_on:
            for child in children:
                yield from self._below(child, stopping, living)


def living_below() -> list[psutil.Process]:
    """List all processes below this one that still run."""
    return [process for process in _all_below(psutil.Process()) if _is_alive(process)]


def only_schedulers(root: int | None) -> list[psutil.Process]:
    """Give the Snakemake processes, where there are no others but shells around them."""
    living = living_below()
    schedulers = [process for process in living if _is_snakemake(_identity(process)[1])]
    others = [p for p in living if p not in schedulers and _identity(p)[0] not in SHELLS]
    return [] if [p for p in others if p.pid != root] else schedulers


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, unless the process is gone or somebody else's."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def _all_below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _identity(process: psutil.Process) -> tuple[str, tuple[str, ...]]:
    """Give name and first arguments; nothing of a process that is gone."""
    try:
        return process.name(), tuple(process.cmdline()[:3])
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return "", ()


def _is_snakemake(arguments: tuple[str, ...]) -> bool:
    """Recognise ``snakemake …``, ``python …/snakemake …`` and ``python -m snakemake …``."""
    return any(Path(argument).name == "snakemake" for argument in arguments)
