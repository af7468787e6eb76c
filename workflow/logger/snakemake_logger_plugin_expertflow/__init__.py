"""Snakemake finds this package by its name; ``logger: [expertflow]`` in a profile enables it."""

import atexit
import sys
from pathlib import Path

from snakemake_logger_plugin_expertflow.handler import LogHandler, LogHandlerSettings
from snakemake_logger_plugin_expertflow.hints import explain_missing_snakefile

__all__ = ["LogHandler", "LogHandlerSettings"]

# Without a Snakefile there is no profile, and thus no handler that could explain anything.
if Path(sys.argv[0]).name == "snakemake" and (line := explain_missing_snakefile(sys.argv[1:])):
    atexit.register(print, f"error: {line}", file=sys.stderr)
