"""The loop of a process that works on untrusted text: limits, then messages until the pipe closes.

It imports the standard library alone; see ``worker`` for the other side.
"""

import json
import math
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any


def set_limit(which: int, amount: int) -> None:
    """Limit this process for good; only processor time can be allowed anew."""
    _, hard = resource.getrlimit(which)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    # macOS refuses a limit on address space; the other limits still hold there.
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (amount, hard if which == resource.RLIMIT_CPU else amount))


def allow_processor_time(cpu_s: int) -> None:
    """Move the limit ahead from now; the system counts over a process's whole life."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + cpu_s)


def serve(
    answer: Callable[["Connection[Any, Any]", dict[str, str]], None],
    *,
    memory_bytes: int,
    cpu_s: int,
) -> None:
    """Answer messages within limits until the other side hangs up."""
    set_limit(resource.RLIMIT_AS, memory_bytes)
    for none_of in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        set_limit(none_of, 0)
    set_limit(resource.RLIMIT_NOFILE, 64)
    # Ctrl-C reaches the whole process group; the other side decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with closing(pipe), suppress(EOFError, ConnectionError):
        while True:
            message = json.loads(pipe.recv_bytes())
            allow_processor_time(cpu_s)
            answer(pipe, message)
