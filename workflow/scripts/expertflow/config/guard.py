"""One-line errors of this run and of its jobs, and the environment by which rules find scripts."""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from expertflow.core.attempts import attempts_path, read_attempts
from expertflow.core.disk import MAKE_ROOM, describe_os_error, describe_space, free_bytes
from expertflow.core.errors import STOPPED, DataError, ExpertflowError, format_error
from expertflow.core.format import show_hidden

# A block of the largest pages; with less, the last line of a log may be cut, or missing.
LEAST_FREE_BYTES = 1 << 16
P = ParamSpec("P")
R = TypeVar("R")


def fail(message: object) -> NoReturn:
    """Exit with a line for each fault."""
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
    """Set the environment by which rules find the interpreter and the scripts.

    They call ``python $EXPERTFLOW/<rule>.py``, from whatever working directory. The report tells
    the command line; in the environment it counts for no rule's settings.
    """
    interpreter = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([interpreter, os.environ.get("PATH", "")])
    os.environ["EXPERTFLOW"] = str(scripts)
    # As in the jobs: cards are counted as the driver counts them.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # How long a CPU's threads spin at a barrier before they sleep (libgomp reads it at load).
    # Its default of 300,000 rounds keeps the thread that is waited for from its core as soon as
    # anything else runs on the machine; a thousand is what it takes itself where it knows of that.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if main:
        os.environ["EXPERTFLOW_COMMAND"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def list_failed_logs(run: Any) -> list[Path]:
    """Return the logs of the jobs that failed in Snakemake's run, of groups those of each job."""
    # A group fails as a whole; which of its jobs did, their logs tell.
    failed = [job for one in run.scheduler.failed for job in (one if one.is_group() else [one])]
    return sorted({Path(str(log)) for job in failed for log in job.log})


def describe_failures(logs: Sequence[Path]) -> str:
    """Return, for each job that failed, its log's path and the line that says why."""
    if not logs:
        return "error: the run was stopped; give the same command again to go on"
    lines = [(log, line) for log in logs if (line := describe_failure(log))]
    return "\n".join(f"{log}\n{line}" for log, line in lines)


def describe_failure(log: Path) -> str:
    """Return the line that a job's log ends with, or what is known without; empty if it did well.

    Only a script that met a fault of its input ends with a line for users; others end with what
    Python printed, and those that were killed with nothing on that.
    """
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
        logged_s, path = log.stat().st_mtime, attempts_path(log)
        # An attempt that ended before Python knew of it is not recorded.
        is_recorded = path.is_file() and path.stat().st_mtime >= logged_s
        code = read_attempts(path)[-1].code if is_recorded else 1
    except (OSError, DataError, LookupError):
        text, code = "", None
    if not text.endswith("\n") and free_bytes(log) < LEAST_FREE_BYTES:
        return f"error: {log}: {describe_space(log)}, too little for the log itself; {MAKE_ROOM}"
    # Empty lines may follow the last words.
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if last.startswith("error: ") or code == 0:
        return last if code else ""
    if code == STOPPED:
        return f"error: {log.stem} was told to stop; run the same command again to continue"
    if last and code is not None:
        return f"error: {show_hidden(last)}; this is unexpected, {log} tells where"
    return (
        f"error: {log.stem} ended without a word, as if killed (out of memory?); give the same"
        " command again, it resumes"
    )
