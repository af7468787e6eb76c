"""Snakemake finds this package by its name; ``logger: [expertflow]`` of a profile turns it on."""

from snakemake_logger_plugin_expertflow.handler import LogHandler

__all__ = ["LogHandler"]
