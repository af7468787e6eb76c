"""A process between the guard and its command, which stops all of it, even if the guard is killed.

It adopts what the command's processes leave behind, ends it and collects it, as the first process
of a container has to. SIGTERM: tell all to stop. SIGUSR1: kill what is left. The kernel sends it
SIGTERM when the guard dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from expertflow.core.process import adopt_orphans, end_with_parent
from expertflow.rental.guard.tree import Stopper, living_below, only_schedulers, send

NAP_S = 0.05
# Snakemake's main thread wakes and notes that it is to end; jobs take longer than that to save.
SETTLE_S = 0.2
# Without jobs Snakemake ends within seconds. If not, it waits for jobs elsewhere, or its handler of
# SIGTERM waits for a lock that it holds: an interrupt ends both.
STUCK_S = 15.0
# What a kill does not end by then waits for a disk or a driver, and may do so for ever.
KILLED_S = 60.0


class Keeper:
    """The guard's side: starts the keeper, tells it what to do, asks whether it ended."""

    def __init__(self, command: Sequence[str], *, grace_s: float) -> None:
        guard = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_keeper(command, guard=guard, grace_s=grace_s)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Give the command's exit code, 128 + n after signal n; null while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code
        return self._code

    def stop(self) -> None:
        """Have all of it told to stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Have what is left killed."""
        self._signal(signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_keeper(command: Sequence[str], *, guard: int, grace_s: float) -> NoReturn:
    """End this process with the command's exit code, and never go on as a second guard."""
    code = os.EX_SOFTWARE
    try:
        code = _keep(command, guard=guard, grace_s=grace_s)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _keep(command: Sequence[str], *, guard: int, grace_s: float) -> int:
    """Run the command and what it leaves behind to their end; give its exit code."""
    came: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: came.add(received))
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
    stop = _Stop(process, grace_s=grace_s)
    while (code := _collected(process)) is None or living_below():
        if code is not None or came:
            stop.go_on(kill=signal.SIGUSR1 in came)
            if stop.is_hopeless:
                left = ", ".join(str(process.pid) for process in living_below())
                print(f"killed and still there: process {left}; going on", file=sys.stderr)
                code = 128 + signal.SIGKILL if code is None else code
                break
        time.sleep(NAP_S)
    return code if code >= 0 else 128 - code


class _Stop:
    """The stop, from the first word to the last."""

    def __init__(self, process: subprocess.Popen[bytes], *, grace_s: float) -> None:
        self._stopper = Stopper(root=process.pid)
        self._root, self._grace_s = process.pid, grace_s
        self._begun_s: float | None = None
        self._alone_s: float | None = None
        self._killed_s: float | None = None

    @property
    def is_hopeless(self) -> bool:
        """Tell whether what is left does not even end by a kill."""
        return self._killed_s is not None and time.monotonic() - self._killed_s > KILLED_S

    def go_on(self, *, kill: bool) -> None:
        """Do what is due now."""
        now_s = time.monotonic()
        if self._begun_s is None:
            self._begun_s = now_s
        if kill or now_s - self._begun_s > self._grace_s:
            self._killed_s = self._killed_s or now_s
            for process in living_below():
                send(process, signal.SIGKILL)
            return
        self._stopper.tell(first=True)
        if now_s - self._begun_s > SETTLE_S:
            self._stopper.tell(first=False)
            self._interrupt_stuck(now_s)

    def _interrupt_stuck(self, now_s: float) -> None:
        schedulers = only_schedulers(self._root)
        if not schedulers:
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = now_s
        elif now_s - self._alone_s > STUCK_S:
            self._alone_s = now_s
            for process in schedulers:
                send(process, signal.SIGINT)


def _in_command() -> None:
    """Undo, in the command, what it would inherit: a shell's background jobs ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_with_parent()


def _collected(process: subprocess.Popen[bytes]) -> int | None:
    """Collect ended processes that were left to this one; give the command's exit code if known."""
    code = process.poll()
    with contextlib.suppress(ChildProcessError):
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (found := os.waitid(os.P_ALL, 0, look)) is not None:
            if found.si_pid == process.pid:
                code = process.poll()
            else:
                os.waitpid(found.si_pid, os.WNOHANG)
    return code
