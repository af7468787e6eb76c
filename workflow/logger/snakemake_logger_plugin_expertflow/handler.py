"""Listen to a dry run, and end it with what its trainings should take.

Snakemake hands every job that would run to its loggers: rule, wildcards and resources. The rule
``train_expert`` puts its forecast into a resource, so all that is done here is to collect and lay
out. A real run is left alone.
"""

import logging
import sys

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from snakemake_logger_plugin_expertflow.table import TRAIN, Plan, print_table

# What Snakemake says last, without an event of its own. A run that ``sys.exit`` ends says neither.
LAST_WORDS = ("This was a dry-run", "Nothing to be done")
QUIET = "Leave out --quiet to see what the trainings should take."


class LogHandler(LogHandlerBase):
    """Collects the jobs of each expert; prints when Snakemake closes its loggers."""

    def __post_init__(self) -> None:
        self._plan = Plan()
        self._n_trainings = 0
        self._has_ended = False
        self._has_failed = False
        self._is_closed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Note a job that would run, or that the run came to an error; all else is left alone."""
        event = getattr(record, "event", None)
        if event is None:
            self._has_ended |= record.getMessage().startswith(LAST_WORDS)
        elif event == LogEvent.RUN_INFO:
            stats = getattr(record, "stats", None)
            self._n_trainings = stats.get(TRAIN, 0) if isinstance(stats, dict) else 0
        elif event == LogEvent.JOB_INFO:
            self._plan.add(
                rule=getattr(record, "rule_name", None),
                wildcards=getattr(record, "wildcards", None),
                resources=getattr(record, "resources", None),
            )
        if record.levelno >= logging.ERROR:
            self._has_failed = True

    def close(self) -> None:
        """Print the table, once, as the last thing of a dry run that came to its end."""
        if self.common_settings.dryrun and not self._has_failed and not self._is_closed:
            self._print()
        self._is_closed = True
        super().close()

    def _print(self) -> None:
        stream = sys.stdout if self.common_settings.stdout else sys.stderr
        is_hidden = self._n_trainings and not self._plan.forecasts
        # Under --quiet Snakemake counts the jobs, tells no more of them, and has no last words.
        if is_hidden and (self._has_ended or self.common_settings.quiet):
            print(f"\n{QUIET}", file=stream)
        elif self._has_ended:
            print_table(self._plan, stream, colour=not self.common_settings.nocolor)

    @property
    def writes_to_stream(self) -> bool:
        """Say no: Snakemake would drop its own log for a plugin that takes the stream over."""
        return False

    @property
    def writes_to_file(self) -> bool:
        """Say no."""
        return False

    @property
    def has_filter(self) -> bool:
        """Say yes: the default filter hides jobs under ``--quiet rules``, and they count here."""
        return True

    @property
    def has_formatter(self) -> bool:
        """Say yes: no record is formatted."""
        return True

    @property
    def needs_rulegraph(self) -> bool:
        """Say no."""
        return False
