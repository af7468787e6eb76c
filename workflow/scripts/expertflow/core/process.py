"""Run commands so that nothing of them is left: not at a signal, a limit or the caller's death."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Snakemake ends its jobs at an interrupt; at a SIGTERM it would wait for them.
STOPS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 10.0
# What a kill does not end by then waits for a disk or a driver, and may do so for ever.
KILLED_S = 5.0
POLL_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Stopped(Exception):
    """A command was ended because its caller no longer wanted it."""


def run_stoppable(
    command: Sequence[str], *, keep_open: Sequence[int] = (), patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own and give what it said.

    ``keep_open`` are files that it inherits.

    Raises:
        SystemExit: a signal asked to stop; nothing of the command is left.
    """
    with noted_signals() as came:
        try:
            done = run_until(
                command, lambda: bool(came), keep_open=keep_open, patience_s=patience_s
            )
        except Stopped:
            raise SystemExit(128 + came[0]) from None
    return done


def run_until(
    command: Sequence[str],
    is_unwanted: Callable[[], bool],
    *,
    given: str = "",
    keep_open: Sequence[int] = (),
    patience_s: float = PATIENCE_S,
    signals: Sequence[signal.Signals] = STOPS,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, from any thread, while its caller wants it.

    ``given`` is its stdin, ``keep_open`` are files that it inherits, ``signals`` ask it to end.

    Raises:
        Stopped: ``is_unwanted`` turned true; nothing of the command is left.
    """
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=keep_open,
        )
        while process.poll() is None and not is_unwanted():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        if is_unwanted():
            stop_group(process, patience_s=patience_s, signals=signals)
            raise Stopped
        stdout.seek(0)
        stderr.seek(0)
        said, problems = stdout.read(), stderr.read()
    return subprocess.CompletedProcess(command, process.returncode, said, problems)


@contextlib.contextmanager
def noted_signals(*, ignorable: Sequence[signal.Signals] = SIGNALS) -> Iterator[list[int]]:
    """Note signals to stop instead of dying of them.

    Those of ``ignorable`` that the caller has ignored stay so, as SIGHUP under nohup.
    """
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {n: signal.getsignal(n) for n in SIGNALS}
    before = {
        number: handler
        for number, handler in before.items()
        if handler != signal.SIG_IGN or number not in ignorable
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_group(
    process: subprocess.Popen[Any],
    *,
    patience_s: float,
    signals: Sequence[signal.Signals] = STOPS,
) -> None:
    """End a session's leader: ask by one signal after the other, then kill what is left of it."""
    for number in signals:
        _signal_all(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience_s)
            break
    # What its leader has left behind, or all of it.
    _signal_all(process, signal.SIGKILL)
    # What was killed may still be writing; its ends of the pipes are closed when it is gone.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=patience_s)
    process.wait()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a group, with all of it; wait a little, since some cannot end."""
    with contextlib.suppress(PermissionError):
        _signal_all(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def _signal_all(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent of this process ends; on Linux only."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind; on Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0)
