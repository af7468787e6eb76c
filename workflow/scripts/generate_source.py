#!/usr/bin/env python3
"""Run the generator of a source, at its locked version."""

from expertflow.core import cli
from expertflow.data.sources.registry import fetch_source

if __name__ == "__main__":
    cli.run_stage(fetch_source)
