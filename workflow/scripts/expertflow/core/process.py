"""Run commands that leave nothing behind after a signal, a limit or the caller's death."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Snakemake ends its jobs on SIGINT; on SIGTERM it would wait for them.
STOPS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 10.0
# A process still alive this long after a kill waits for a disk or a driver, perhaps forever.
KILLED_S = 5.0
POLL_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class CommandStopped(Exception):
    """A command was stopped because its caller no longer needed it."""


def run_stoppable(
    command: Sequence[str], *, keep_open: Sequence[int] = (), patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new session; return its result.

    It inherits the files ``keep_open``. Raises SystemExit on a signal, after the command has ended.
    """
    with record_signals() as received:
        try:
            return run_until(
                command, lambda: bool(received), keep_open=keep_open, patience_s=patience_s
            )
        except CommandStopped:
            raise SystemExit(128 + received[0]) from None


def run_until(
    command: Sequence[str],
    is_unwanted: Callable[[], bool],
    *,
    given: str = "",
    keep_open: Sequence[int] = (),
    patience_s: float = PATIENCE_S,
    signals: Sequence[signal.Signals] = STOPS,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new session, from any thread, until its caller gives up.

    ``given`` is its stdin, ``keep_open`` are inherited files, ``signals`` ask it to exit. Raises
    CommandStopped once ``is_unwanted`` is true and the command has ended.
    """
    with (
        # It may contain file names, which need not be UTF-8.
        tempfile.TemporaryFile("w+", errors="surrogateescape") as stdin,
        # A remote shell may write in any encoding.
        tempfile.TemporaryFile("w+", errors="replace") as stdout,
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
    ):
        # Files, not pipes: a command blocks on a full pipe that nobody reads.
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            # Ctrl-C in the terminal reaches only the caller, which ends the command's processes.
            start_new_session=True,
            pass_fds=keep_open,
        )
        while process.poll() is None and not is_unwanted():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        if is_unwanted():
            stop_group(process, patience_s=patience_s, signals=signals)
            raise CommandStopped
        stdout.seek(0)
        stderr.seek(0)
        output, errors = stdout.read(), stderr.read()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextlib.contextmanager
def record_signals(*, ignorable: Sequence[signal.Signals] = SIGNALS) -> Iterator[list[int]]:
    """Record stop signals instead of dying from them.

    Signals in ``ignorable`` that the caller ignores stay ignored, such as SIGHUP under nohup.
    """
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {
        number: handler
        for number in SIGNALS
        if (handler := signal.getsignal(number)) != signal.SIG_IGN or number not in ignorable
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_group(
    process: subprocess.Popen[Any],
    *,
    patience_s: float,
    signals: Sequence[signal.Signals] = STOPS,
) -> None:
    """End a session's leader with one signal after another, then kill the rest of its group."""
    for number in signals:
        _signal_all(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience_s)
            break
    # Whatever the leader has left behind.
    _signal_all(process, signal.SIGKILL)
    # Killed processes may still be writing; their pipes close when they are gone.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=patience_s)
    process.wait()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process group by its leader; wait only briefly, since some cannot be killed."""
    with contextlib.suppress(PermissionError):
        _signal_all(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def _signal_all(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had since its program started."""
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text("utf-8"))):
        return int(found[1]) * 1024
    # It can be the parent's: a program inherits it. Linux reports KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when this process's parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of processes orphaned by descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0)
