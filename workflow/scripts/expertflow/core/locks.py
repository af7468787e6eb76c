"""Locks on files, which die with their process, and file systems that have none."""

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
# Below a working directory: a lock for each expert, held by the run that makes it.
EXPERT_LOCKS = Path(".snakemake", "expertflow")
Outcome = Literal["taken", "held", "no locks"]


def flock(stream: IO[Any], *, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another one holds it.

    ``wait`` for that one; a ``shared`` lock is held together with others of its kind.

    Raises:
        OSError: the file system has no locks, for one.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(stream, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock(stream: IO[Any], *, wait: bool = False) -> Outcome:
    """Lock an open file until it is closed, unless another one holds it; ``wait`` for that one.

    Where the file system has no locks, that is logged, and what follows is the caller's choice.
    """
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


def sign(stream: IO[str], **more: Any) -> None:
    """Write into a lock's file who holds it; opened to read and append."""
    stream.truncate(0)
    stream.write(json.dumps({**more, "host": socket.gethostname(), "pid": os.getpid()}) + "\n")
    stream.flush()


def holder(stream: IO[str]) -> dict[str, Any]:
    """Read who holds a lock, or held it last; nothing where nobody has signed."""
    stream.seek(0)
    try:
        found: dict[str, Any] = json.loads(stream.read())
    except ValueError:
        return {}
    return found
