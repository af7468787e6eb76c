"""Handle Snakemake's log: one line per job, what went wrong, and a dry run's cost forecast.

Snakemake's own output goes to its log. It passes every job that would run to its loggers: rule,
wildcards and resources. The forecast is a resource of jobs.
"""

import ast
import json
import logging
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

from snakemake_logger_plugin_expertflow.hints import explain
from snakemake_logger_plugin_expertflow.jobs import Job, format_duration, read_job
from snakemake_logger_plugin_expertflow.screen import Screen
from snakemake_logger_plugin_expertflow.table import PendingJobs, print_table

# Snakemake's last messages, which have no event. A run ended by ``sys.exit`` has neither.
LAST_WORDS = ("This was a dry-run", "Nothing to be done")
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


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    snakemake: bool = field(
        default=False,
        metadata={"help": "print Snakemake's own output; --verbose does, too"},
    )


class LogHandler(LogHandlerBase):
    """Shows the run or, for a dry run, the jobs that would run, with the table at its end."""

    def __post_init__(self) -> None:
        common = self.common_settings
        self._stream = sys.stdout if common.stdout else sys.stderr
        # Quietness.RULES is "rules".
        self._quiet = {str(level).rpartition(".")[2].lower() for level in common.quiet or ()}
        self._pending = PendingJobs()
        self._running: dict[int, Job] = {}
        # Failed for good, although Snakemake starts them again.
        self._lost: set[int] = set()
        self._n_done, self._n_jobs, self._n_planned = 0, 0, 0
        self._has_started, self._has_ended, self._has_failed = False, False, False
        color = not common.nocolor
        self._screen = Screen(self._stream, lambda: list(self._running.values()), color=color)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event is None:
            # Only a completed dry run prints the table, not one that Ctrl-C or an error ended.
            self._has_ended |= record.getMessage().startswith(LAST_WORDS)
        elif event == LogEvent.JOB_INFO:
            self._pending.add_job(record)
        self._has_failed |= record.levelno >= logging.ERROR or event == LogEvent.JOB_ERROR
        # The reader of the output may be gone, as in ``snakemake -n | head``; the run continues.
        with suppress(OSError):
            if self.writes_to_stream:
                self._show(event, record)

    def _show(self, event: object, record: logging.LogRecord) -> None:
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
        """Hide the live lines; after a completed dry run, print the number of jobs and the table.

        ``logging.shutdown`` calls it again, when nothing is left to print.
        """
        with suppress(OSError):
            self._running.clear()
            self._screen.hide_running()
            if self._n_planned and not self._is_quiet_about("all"):
                self._screen.print(f"total      {self._n_planned} jobs")
            if self.common_settings.dryrun and self._has_ended and not self._has_failed:
                print_table(self._pending, self._stream)
        self._n_planned, self._has_ended = 0, False
        super().close()

    @property
    def writes_to_stream(self) -> bool:
        """Whether this view stands in for Snakemake's own output, which the user may ask for."""
        common, own = self.common_settings, self.settings
        asked = isinstance(own, LogHandlerSettings) and own.snakemake
        return not (asked or common.verbose or common.debug_dag)

    # Abstract properties of the base class.
    writes_to_file = property(lambda self: False)
    # Snakemake's own filter hides jobs under ``--quiet rules``, but they count here.
    has_filter = property(lambda self: True)
    has_formatter = property(lambda self: True)
    needs_rulegraph = property(lambda self: False)

    def _is_quiet_about(self, what: str) -> bool:
        return bool(self._quiet & {"all", what})

    def _start(self, record: logging.LogRecord) -> None:
        job = read_job(record)
        if self.common_settings.dryrun:
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
            if number in self._lost:
                return
            if job.will_fail_again():
                self._lost.add(number)
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
        if text in {f"Trying to restart job {number}." for number in self._lost}:
            return
        if is_warning or not self._has_started or text.startswith(KEPT):
            self._screen.print(text.rstrip(), style="yellow" if is_warning else "")

    def _show_error(self, text: str) -> None:
        if text.startswith(NO_REASON):
            return
        line = f"error: {explain(text, sys.argv[1:])}"
        if self.common_settings.dryrun:
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
