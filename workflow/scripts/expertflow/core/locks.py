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


def try_lock(stream: IO[Any], *, wait: bool = False) -> Outcome:
    """Lock an open file until it is closed, unless another one holds it; ``wait`` for that one.

    Where the file system has no locks, that is logged, and what follows is the caller's choice.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks (%s); see that nothing else is at work there",
            stream.name, error.strerror,
        )  # fmt: skip
        return "no locks"
    return "taken"


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
