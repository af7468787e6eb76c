"""Handle Snakemake's log: show the run, and end a dry run with a cost forecast per training.

Snakemake passes every job that would run to its loggers: rule, wildcards and resources. The
forecast is a resource of ``train_expert``; this module collects and prints it.
"""

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

from snakemake_logger_plugin_expertflow.table import PendingJobs, print_table
from snakemake_logger_plugin_expertflow.view import RunView

# Snakemake's last messages, which have no event. A run ended by ``sys.exit`` has neither.
LAST_WORDS = ("This was a dry-run", "Nothing to be done")


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    snakemake: bool = field(
        default=False,
        metadata={"help": "print Snakemake's own output; --verbose does, too"},
    )


class LogHandler(LogHandlerBase):
    """Shows the run; prints the table of a dry run when Snakemake closes its loggers."""

    def __post_init__(self) -> None:
        self._jobs = PendingJobs()
        self._has_ended = False
        self._has_failed = False
        common = self.common_settings
        self._stream = sys.stdout if common.stdout else sys.stderr
        self._view = RunView(
            self._stream,
            dryrun=common.dryrun,
            quiet=common.quiet or (),
            color=not common.nocolor,
        )

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record)
        if not self.writes_to_stream:
            return
        # The reader of the output may be gone, as in ``snakemake -n | head``; the run continues.
        with suppress(OSError):
            self._view.show(record)

    def _note(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event is None:
            # Only a completed dry run prints the table, not one that Ctrl-C or an error ended.
            self._has_ended |= record.getMessage().startswith(LAST_WORDS)
        elif event == LogEvent.JOB_INFO:
            self._jobs.add_job(record)
        if record.levelno >= logging.ERROR:
            self._has_failed = True

    def close(self) -> None:
        """Print the table, once, at the end of a completed dry run."""
        with suppress(OSError):
            self._view.close()
            if self.common_settings.dryrun and self._has_ended and not self._has_failed:
                print_table(self._jobs, self._stream)
        self._has_ended = False  # logging.shutdown closes it again
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
