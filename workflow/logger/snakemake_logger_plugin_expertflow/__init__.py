"""Snakemake finds this package by its name; ``logger: [expertflow]`` in a profile enables it."""

from snakemake_logger_plugin_expertflow.handler import LogHandler, LogHandlerSettings

__all__ = ["LogHandler", "LogHandlerSettings"]
