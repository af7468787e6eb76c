"""A process between guard and command that stops the command's entire process tree.

It adopts and reaps orphans, like a container's init. SIGTERM, which the kernel also sends if the
guard dies, stops everything; SIGUSR1 kills what is left.

Snakemake is stopped first: it starts no more jobs and waits for running ones. Then the jobs' own
processes, which save and exit. Shells and pipes around them end with what they serve: if a shell
ends before its trainer, Snakemake deletes what the trainer still writes, and without its log pipe
the trainer fails. Children of a job (a launcher's trainers, a loader's workers) are left to it.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil

from expertflow.core.process import adopt_orphans, end_with_parent

log = logging.getLogger(__name__)
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox"})
PIPES = frozenset({"tee", "cat"})
NAP_S = 0.05
# Time for Snakemake's main thread to wake up and register the stop; jobs take longer to save.
SETTLE_S = 0.2
# Without jobs Snakemake ends within seconds. If it does not, it waits for jobs elsewhere, or its
# SIGTERM handler deadlocks on a lock that it holds: SIGINT ends both.
STUCK_S = 15.0
# A process that survives SIGKILL this long waits for a disk or a driver, maybe forever.
KILLED_S = 60.0
# The supervisor gives up before the guard does.
MARGIN_S = 10.0


class Supervisor:
    def __init__(self, command: Sequence[str], *, grace_s: float) -> None:
        guard = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become_supervisor(command, guard=guard, grace_s=grace_s)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code
        return self._code

    def wait(self) -> int:
        """Return the exit code once all has ended; after a while, that of a killed command."""
        deadline_s = time.monotonic() + KILLED_S + MARGIN_S
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                log.error("killed but still running: process %d and below; continuing", self.pid)
                return 128 + signal.SIGKILL
            time.sleep(NAP_S)
        return code

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become_supervisor(command: Sequence[str], *, guard: int, grace_s: float) -> NoReturn:
    code = os.EX_SOFTWARE
    try:
        code = _supervise(command, guard=guard, grace_s=grace_s)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        # Whatever happened, the fork must not continue as a second guard.
        os._exit(code)


def _supervise(command: Sequence[str], *, guard: int, grace_s: float) -> int:
    arrived: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: arrived.add(received))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    adopt_orphans()
    end_with_parent()
    if os.getppid() != guard:
        return 128 + signal.SIGTERM
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=_in_command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    stop = _Stop(process.pid, grace_s=grace_s)
    while (code := _collect(process)) is None or _living():
        if code is not None or arrived:
            stop.go_on(kill=signal.SIGUSR1 in arrived)
            if stop.is_hopeless:
                left = ", ".join(str(process.pid) for process in _living())
                print(f"killed but still running: process {left}; continuing", file=sys.stderr)
                code = 128 + signal.SIGKILL if code is None else code
                break
        time.sleep(NAP_S)
    return code if code >= 0 else 128 - code


def _in_command() -> None:
    # Otherwise it would inherit a shell's ignored SIGINT for background jobs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_with_parent()


def _collect(process: subprocess.Popen[bytes]) -> int | None:
    """Reap all that has ended, orphans too; return the command's exit code once it has."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == process.pid:
                process.returncode = os.waitstatus_to_exitcode(found[1])
    return process.returncode


class _Stop:
    """Stops all processes, from the first signal to the last, while new ones may appear."""

    def __init__(self, root: int, *, grace_s: float) -> None:
        self._root, self._grace_s = root, grace_s
        self._signaled: set[psutil.Process] = set()
        self._seen: set[psutil.Process] = set()
        self._begun_s = self._killed_s = math.inf
        self._alone_s: float | None = None

    @property
    def is_hopeless(self) -> bool:
        """Return whether the remaining processes survive even SIGKILL."""
        return time.monotonic() - self._killed_s > KILLED_S

    def go_on(self, *, kill: bool) -> None:
        now_s = time.monotonic()
        self._begun_s = min(self._begun_s, now_s)
        if kill or now_s - self._begun_s > self._grace_s:
            self._killed_s = min(self._killed_s, now_s)
            for process in _living():
                _send(process, signal.SIGKILL)
            return
        is_settled = now_s - self._begun_s > SETTLE_S
        self._terminate(jobs=is_settled)
        if is_settled:
            self._interrupt_stuck(now_s)

    def _terminate(self, *, jobs: bool) -> None:
        """Send SIGTERM, once each, to Snakemake and the command itself; to jobs, too, if asked."""
        living = set(_living())
        for child in psutil.Process().children():
            for process, is_scheduler in self._targets(child, living):
                if (jobs or is_scheduler) and process not in self._signaled:
                    self._signaled.add(process)
                    _send(process, signal.SIGTERM)
        self._seen |= living

    def _targets(
        self, process: psutil.Process, living: set[psutil.Process]
    ) -> Iterator[tuple[psutil.Process, bool]]:
        """Yield the processes of a tree to signal; with True, Snakemake and the root."""
        if process not in living:
            return
        children, (name, is_scheduler) = _below(process), _identity(process)
        passes_on = name in SHELLS or is_scheduler
        passes_on |= any(_identity(child)[1] for child in _below(process, recursive=True))
        if process.pid == self._root or is_scheduler:
            yield process, True
        elif name in SHELLS:
            # It has gone on to its next command; what it waited for has ended.
            if self._seen.isdisjoint(children):
                yield process, False
        elif name not in PIPES and not passes_on:
            yield process, False
        if passes_on:
            for child in children:
                yield from self._targets(child, living)

    def _interrupt_stuck(self, now_s: float) -> None:
        schedulers, others = [], []
        for process in _living():
            name, is_scheduler = _identity(process)
            if is_scheduler:
                schedulers.append(process)
            elif name not in SHELLS and process.pid != self._root:
                others.append(process)
        if not schedulers or others:
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = now_s
        elif now_s - self._alone_s > STUCK_S:
            self._alone_s = now_s
            for process in schedulers:
                _send(process, signal.SIGINT)


def _living() -> list[psutil.Process]:
    found = []
    for process in _below(psutil.Process(), recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _below(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=recursive))
    except psutil.NoSuchProcess:
        return []


def _identity(process: psutil.Process) -> tuple[str, bool]:
    """Return a process's name, and whether it is Snakemake; empty for a process that has ended."""
    try:
        # snakemake …, python …/snakemake …, or python -u -X dev -m snakemake …
        words = process.cmdline()
        plain = [word for before, word in pairwise(words) if before not in ("-W", "-X")]
        first = next((word for word in plain if not word.startswith("-")), "")
        programs = {Path(word).name for word in (*words[:1], first)}
        return process.name(), "snakemake" in programs
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return "", False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)
