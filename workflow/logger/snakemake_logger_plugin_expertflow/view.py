"""Show a run as one line per job, and what went wrong; Snakemake's own output goes to its log."""

import ast
import json
import logging
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import TextIO

from snakemake_interface_logger_plugins.common import LogEvent

from snakemake_logger_plugin_expertflow.hints import explain
from snakemake_logger_plugin_expertflow.jobs import Job, format_duration, read_job
from snakemake_logger_plugin_expertflow.screen import Screen

# Snakemake's messages without an event that tell a user something.
KEPT = ("Nothing to be done", "Trying to restart", "Terminating", "Will exit", "Complete log")
# Its messages before it knows whether anything will run.
LEFT_OUT = ("Assuming unrestricted shared filesystem",)
# A failed run ends with the line of the failed job, without these.
NO_REASON = (
    "Exiting because a job execution failed",
    "RuleException:\nCalledProcessError",
    "WorkflowError:\nAt least one job did not complete",
)
# Reasons that are clear without the files that Snakemake lists, and one that follows from others.
CLEAR = "Missing output files"
FOLLOWS = "Input files updated by another job"


class RunView:
    """Prints a run's events to a stream; for a dry run, the jobs that would run."""

    def __init__(
        self, stream: TextIO, *, dryrun: bool, quiet: Collection[object], color: bool
    ) -> None:
        self._is_dry = dryrun
        # Quietness.RULES is "rules".
        self._quiet = {str(level).rpartition(".")[2].lower() for level in quiet}
        self._running: dict[int, Job] = {}
        self._n_done, self._n_jobs, self._has_started, self._has_failed = 0, 0, False, False
        self._n_planned = 0
        self._screen = Screen(stream, lambda: list(self._running.values()), color=color)

    def show(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.WORKFLOW_STARTED:
            self._has_started = True
        elif event == LogEvent.RUN_INFO:
            stats = getattr(record, "stats", None)
            self._n_jobs = stats.get("total", 0) if isinstance(stats, dict) else 0
        elif event == LogEvent.JOB_INFO:
            self._start(record)
        elif event in (LogEvent.JOB_FINISHED, LogEvent.JOB_ERROR):
            self._end(record, has_failed=event == LogEvent.JOB_ERROR)
        elif event == LogEvent.ERROR or (event is None and record.levelno >= logging.ERROR):
            self._show_error(record.getMessage())
        elif event is None:
            self._show_message(record)

    def close(self) -> None:
        """Hide the live lines; after a dry run, print the number of jobs."""
        self._running.clear()
        self._screen.hide_running()
        if self._n_planned and not self._is_quiet_about("all"):
            self._screen.print(f"total      {self._n_planned} jobs")
        self._n_planned = 0

    def _is_quiet_about(self, what: str) -> bool:
        return bool(self._quiet & {"all", what})

    def _start(self, record: logging.LogRecord) -> None:
        job = read_job(record)
        if self._is_dry:
            self._n_planned += 1
            if not self._is_quiet_about("rules"):
                reason = _shorten(str(getattr(record, "reason", "")))
                self._screen.print(f"would run  {_columns(job)}  {reason}".rstrip())
            return
        self._running[getattr(record, "jobid", -1)] = job
        if not self._is_quiet_about("progress"):
            self._screen.show_running()

    def _end(self, record: logging.LogRecord, *, has_failed: bool) -> None:
        # Snakemake 9 calls it job_id in JOB_FINISHED and jobid elsewhere.
        number = getattr(record, "jobid" if has_failed else "job_id", -1)
        job = self._running.pop(number, None)
        if not self._running:
            self._screen.hide_running()
        if job is None:
            return
        if has_failed:
            self._has_failed = True
            text = f"{self._count('failed')}  {_columns(job)}  {format_duration(job.elapsed_s)}"
            if not self._is_quiet_about("rules"):
                self._screen.print(f"{text}  {job.log or ''}".rstrip(), style="red")
            return
        self._n_done += 1
        if not self._is_quiet_about("rules"):
            count, took = f"{self._n_done}/{self._n_jobs}", format_duration(job.read_duration_s())
            self._screen.print(f"{self._count(count)}  {_columns(job)}  {took}")

    def _count(self, text: str) -> str:
        return text.rjust(max(len("failed"), 2 * len(str(self._n_jobs)) + 1))

    def _show_message(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        is_warning = record.levelno >= logging.WARNING
        if self._is_quiet_about("all") or text.startswith(LEFT_OUT):
            return
        if text.startswith("Complete log") and not self._has_failed:
            return
        if is_warning or not self._has_started or text.startswith(KEPT):
            self._screen.print(text.rstrip(), style="yellow" if is_warning else "")

    def _show_error(self, text: str) -> None:
        self._has_failed = True
        if text.startswith(NO_REASON):
            return
        line = f"error: {explain(text, sys.argv[1:])}"
        if self._is_dry:
            # Other output of a dry run goes to stdout, where Snakemake puts its errors, too.
            print(line, file=sys.stderr)
        else:
            self._screen.print(line, style="red")


def _columns(job: Job) -> str:
    return f"{job.stage:<21}  {job.expert:<12}  {job.details:<18}"


def _shorten(reason: str) -> str:
    """Return Snakemake's reasons for a job, without files where they are not the reason.

    >>> _shorten("Missing output files: a.json, b; Code has changed since last execution")
    'missing output files; code has changed since last execution'
    """
    # All settings of a rule, in both versions, would be thousands of characters.
    reason, _, versions = reason.partition(" Union of exclusive params ")
    clauses = f"{reason} {_name_changed(versions)}".rstrip(" :").split("; ")
    # Updated input follows from the jobs above, so it is shown only without another reason.
    own = [clause for clause in clauses if not clause.startswith(FOLLOWS)] or [FOLLOWS]
    short = [clause.partition(":")[0] if clause.startswith(CLEAR) else clause for clause in own]
    return "; ".join(clause[:1].lower() + clause[1:] for clause in short)


def _name_changed(versions: str) -> str:
    """List the settings that differ, and the code if its digest does."""
    names = ["code"] if re.search(r"'[0-9a-f]{16}'", versions) else []
    with suppress(ValueError, SyntaxError):
        old, new = map(json.loads, map(ast.literal_eval, re.findall(r"'{.*?}'(?=,'| )", versions)))
        names += sorted(key for key in old | new if old.get(key) != new.get(key))
    return ", ".join(names)
