"""End a run that failed with the lines that its jobs failed with; Snakemake tells their logs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertflow.core.attempts import attempts_path, read_attempts
from expertflow.core.errors import DataError
from expertflow.core.format import show_hidden


def list_failed_logs(run: Any) -> list[Path]:
    """Return the logs of the jobs that failed in Snakemake's run, of groups those of each job."""
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
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        logged_s, path = log.stat().st_mtime, attempts_path(log)
        # An attempt that ended before Python knew of it is not recorded.
        is_recorded = path.is_file() and path.stat().st_mtime >= logged_s
        code = read_attempts(path)[-1].code if is_recorded else 1
    except (OSError, DataError, LookupError):
        lines, code = [], None
    last = next((line for line in reversed(lines) if line.strip()), "")
    if last.startswith("error: ") or code == 0:
        return last if code else ""
    if last and code is not None:
        return f"error: {show_hidden(last)}; this is unexpected, {log} tells where"
    return (
        f"error: {log.stem} ended without a word, as if killed (out of memory?); give the same"
        " command again, it resumes"
    )
