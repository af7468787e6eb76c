"""A separate process for untrusted text, fed message by message and killed if it stalls.

``Worker`` is the caller's side. This file is also the script of the process, started by path and
isolated (-I): it imports neither the caller's script and libraries nor anything from the
environment. It runs ``main`` of a module, which calls ``serve_messages`` to set limits and answer
until the pipe closes.
"""

import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# The environment may contain secrets; some builds of Python need the path of their library.
_KEPT = ("LD_LIBRARY_PATH",)
_SCRIPT = str(Path(__file__).resolve())

# From a message to the kind and detail of its answer.
Answer = Callable[[dict[str, Any]], tuple[str, Any]]


class Worker:
    """The process, started on demand; ``wall_s`` limits each answer."""

    def __init__(
        self, module: str, options: Mapping[str, Any], *, wall_s: float, quiet: bool = False
    ) -> None:
        """Store the arguments of the module's ``main``; ``quiet`` drops its stderr."""
        self._arguments = [module, json.dumps(dict(options))]
        self._wall_s, self._stderr = wall_s, subprocess.DEVNULL if quiet else None
        self._running: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def ask(
        self, message: Mapping[str, str | None], wall_s: float | None = None
    ) -> tuple[str, Any]:
        """Return the answer to a message, ``(kind, detail)``; ``timed_out`` if there is none."""
        process, pipe = self._start()
        wall_s = self._wall_s if wall_s is None else wall_s
        detail = f"no answer within {wall_s:g} s"
        with suppress(ConnectionError):
            # ASCII with escapes, so that even lone surrogates arrive unchanged.
            pipe.send_bytes(json.dumps(dict(message)).encode("ascii"))
        if pipe.poll(wall_s):
            with suppress(EOFError, ConnectionError):
                kind, found = json.loads(pipe.recv_bytes())
                return kind, found
            detail = f"its process exited with code {process.wait()}"
        self.close()
        return "timed_out", detail

    def close(self) -> None:
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            pipe.close()
            process.kill()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], "Connection[Any, Any]"]:
        if self._running is None:
            ours, theirs = Pipe()
            descriptor = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-I", _SCRIPT, str(descriptor), *self._arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
            )
            # With a copy open here, the death of the process would not close the pipe.
            theirs.close()
            self._running = process, ours
        return self._running


def set_limit(which: int, amount: int) -> None:
    """Limit this process permanently; only processor time can be raised again."""
    _, hard = resource.getrlimit(which)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    # The hard limit of processor time stays, so that a later message may be allowed more.
    resource.setrlimit(which, (amount, hard if which == resource.RLIMIT_CPU else amount))


def allow_processor_time(cpu_s: int) -> None:
    """Allow more processor time from now; the system counts over the life of the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + cpu_s)


def serve_messages(answer: Answer, *, memory_bytes: int, cpu_s: int) -> None:
    set_limit(resource.RLIMIT_AS, memory_bytes)
    for none_of in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        set_limit(none_of, 0)
    set_limit(resource.RLIMIT_NOFILE, 64)
    # Ctrl-C reaches the complete process group; the caller decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with closing(pipe), suppress(EOFError, ConnectionError):
        while True:
            message = json.loads(pipe.recv_bytes())
            allow_processor_time(cpu_s)
            pipe.send_bytes(json.dumps(answer(message)).encode("ascii"))


if __name__ == "__main__":  # isolated, it does not find the project by itself
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(sys.argv[2]).main(json.loads(sys.argv[3]))
