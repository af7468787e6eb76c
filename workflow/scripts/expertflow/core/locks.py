"""File locks that die with their process, and file systems without locks."""

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import IO, Any, Literal

log = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# Below a working directory: a lock per expert, held by the run that makes it.
EXPERT_LOCKS = Path(".snakemake", "expertflow")
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


def try_lock(stream: IO[Any], *, wait: bool = False) -> Outcome:
    """Like ``flock``, but log a file system without locks and leave the decision to the caller."""
    try:
        return "taken" if flock(stream, wait=wait) else "held"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks (%s); see that nothing else is at work there",
            stream.name, error.strerror,
        )  # fmt: skip
        return "no locks"


def sign_lock(stream: IO[str], **more: Any) -> None:
    """Write the holder into a lock's file, which must be open for reading and appending."""
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
