"""File locks that die with their process, and file systems without locks."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Any, Literal

from expertflow.core.errors import TransientError

log = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# Relative to a working directory: a lock per expert, held by the run that makes it.
EXPERT_LOCKS = Path(".snakemake", "expertflow")
POLL_S, TOLD_EVERY_S, LIMIT_S = 0.1, 60.0, 24 * 3600.0
Outcome = Literal["taken", "held", "no locks"]


def flock(stream: IO[Any], *, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds it.

    ``wait`` blocks until it is free; ``shared`` locks can be held together. Raises OSError, for
    example if the file system has no locks.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(stream, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock(stream: IO[Any], *, wait: bool = False, shared: bool = False) -> Outcome:
    """Like ``flock``, but log a file system without locks and leave the decision to the caller."""
    try:
        return "taken" if flock(stream, wait=wait, shared=shared) else "held"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks (%s); make sure that nothing else works there",
            stream.name, error.strerror,
        )  # fmt: skip
        return "no locks"


def wait_for_lock(
    stream: IO[Any],
    reason: str,
    *,
    shared: bool = False,
    limit_s: float = LIMIT_S,
    fix: str = "stop it, and run again",
) -> None:
    """Wait for a lock, logging the reason every minute; TransientError after ``limit_s``."""
    start_s, logged_s = time.monotonic(), -TOLD_EVERY_S
    # Polled: while a lock blocks, nothing could be logged.
    while not flock(stream, shared=shared):
        waited_s = time.monotonic() - start_s
        if waited_s >= limit_s:
            waited = f"{waited_s:.0f} s" if waited_s < 3600 else f"{waited_s / 3600:.0f} h"
            raise TransientError(f"{reason}, for {waited} now; {fix}")
        if waited_s - logged_s >= TOLD_EVERY_S:
            log.warning("%s; waiting for it; Ctrl-C ends the wait", reason)
            logged_s = waited_s
        time.sleep(POLL_S)


def sign_lock(stream: IO[str], **more: Any) -> None:
    """Write the holder into a lock file, which must be open for reading and appending."""
    # Opened for appending, so that opening alone does not erase who holds it.
    stream.truncate(0)
    stream.write(json.dumps({**more, "host": socket.gethostname(), "pid": os.getpid()}) + "\n")
    stream.flush()


def read_holder(stream: IO[str]) -> dict[str, Any]:
    """Return the current or last holder of a lock; empty if nobody signed it."""
    stream.seek(0)
    try:
        found: dict[str, Any] = json.loads(stream.read())
    except ValueError:
        return {}
    return found
