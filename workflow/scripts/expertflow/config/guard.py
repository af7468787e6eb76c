"""One-line errors of this run and its jobs, and the environment in which rules find scripts."""

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from expertflow.core.attempts import attempts_path, read_attempts
from expertflow.core.disk import MAKE_ROOM, describe_os_error, describe_space, free_bytes
from expertflow.core.errors import STOPPED, DataError, ExpertflowError, format_error
from expertflow.core.format import show_hidden

# A block of the largest pages; with less, the last line of a log may be truncated or missing.
LEAST_FREE_BYTES = 1 << 16
P = ParamSpec("P")
R = TypeVar("R")


def fail(message: object) -> NoReturn:
    """Exit with one line per fault."""
    sys.exit(format_error(message))


def note(message: str) -> None:
    print(f"note: {show_hidden(message)}", file=sys.stderr)


def one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a user's error into a line on stderr; Snakemake would print a traceback."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ExpertflowError as error:
            fail(error)
        except OSError as error:
            if (line := describe_os_error(error)) is None:
                raise
            fail(line)

    return wrapped


def set_environment(scripts: Path, *, main: bool) -> None:
    """Set the environment in which rules find the interpreter and the scripts.

    They call ``python $EXPERTFLOW/<rule>.py`` from any working directory. The report shows the
    command line, which in the environment is not part of any rule's settings.
    """
    interpreter = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([interpreter, os.environ.get("PATH", "")])
    os.environ["EXPERTFLOW"] = str(scripts)
    # As in the jobs: cards are numbered as the driver does.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # How long a CPU's threads spin at a barrier before they sleep (libgomp reads it at load).
    # With its default of 300,000 rounds, they keep the thread they wait for off its core as soon as
    # anything else runs on the machine; a thousand is what it uses itself when it detects that.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if main:
        os.environ["EXPERTFLOW_COMMAND"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def describe_failures(run: Any) -> str:
    """Return the log of each job that failed in Snakemake's run, and the line that says why."""
    # A group fails as a whole; the logs show which of its jobs did.
    failed = [job for one in run.scheduler.failed for job in (one if one.is_group() else [one])]
    logs = sorted({Path(str(log)) for job in failed for log in job.log})
    if not logs:
        return "error: the run was stopped; run the same command again to continue"
    lines = [(log, line) for log in logs if (line := describe_failure(log))]
    return "\n".join(f"{log}\n{line}" for log, line in lines)


def describe_failure(log: Path) -> str:
    """Return the last line of a job's log, or what is known without it; empty if it succeeded.

    Only a script that found a fault in its input ends with a line for users; others end with what
    Python printed, and those that were killed with no explanation.
    """
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
        logged_s, path = log.stat().st_mtime, attempts_path(log)
        # An attempt that ended before its script could record it is not in there.
        is_recorded = path.is_file() and path.stat().st_mtime >= logged_s
        code = read_attempts(path)[-1].code if is_recorded else 1
    except (OSError, DataError, LookupError):
        text, code = "", None
    if not text.endswith("\n") and free_bytes(log) < LEAST_FREE_BYTES:
        return f"error: {log}: {describe_space(log)}, too little for the log itself; {MAKE_ROOM}"
    # Empty lines may follow the last message.
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if last.startswith("error: ") or code == 0:
        return last if code else ""
    if code == STOPPED:
        return f"error: {log.stem} was stopped by a signal; run the same command again to continue"
    if last and code is not None:
        return f"error: {show_hidden(last)}; this is unexpected, see {log}"
    return (
        f"error: {log.stem} ended without a message, as if killed (out of memory?); run the same"
        " command again to resume"
    )
