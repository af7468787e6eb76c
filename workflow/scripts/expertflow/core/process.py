"""Stop a command with all its processes, also when a signal ends whoever asked for it."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Snakemake ends its jobs at an interrupt; at a SIGTERM it would wait for them.
STOPS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 10.0
POLL_S = 0.2


def run_stoppable(
    command: Sequence[str], *, keep_open: Sequence[int] = (), patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own and give what it said.

    ``keep_open`` are files that it inherits.

    Raises:
        SystemExit: a signal asked to stop; nothing of the command is left.
    """
    with noted_signals() as came:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=keep_open,
        )
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, problems = process.communicate(timeout=POLL_S)
                break
            if came:
                stop_group(process, patience_s=patience_s)
                raise SystemExit(128 + came[0])
        if came:
            raise SystemExit(128 + came[0])
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


def _signal_all(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
