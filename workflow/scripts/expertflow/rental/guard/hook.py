"""Run the user's stop command."""

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping

log = logging.getLogger(__name__)
LIMIT_S, KILLED_S = 120.0, 5.0
# As of timeout(1).
TIMED_OUT = 124


def run_hook(command: str, environment: Mapping[str, str], *, limit_s: float = LIMIT_S) -> int:
    """Run a shell command that is never shown; what it says goes where the guard's words go.

    One that does not end is killed with all of its group, and counts as failed.
    """
    own = {**os.environ, **environment}
    process = subprocess.Popen(command, shell=True, env=own, start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    log.error("the stop command did not end within %.0f s", limit_s)
    kill_group(process)
    return TIMED_OUT


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that leads a group, with all of it; wait a little, since some cannot end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)
