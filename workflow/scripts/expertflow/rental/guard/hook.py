"""Run the user's stop command."""

import contextlib
import logging
import os
import subprocess
from collections.abc import Mapping

from expertflow.core.process import kill_group

log = logging.getLogger(__name__)
LIMIT_S = 120.0
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
