#!/usr/bin/env python3
"""Make a local, hub or git source readable on this disk, at its locked version."""

from expertflow.core import cli
from expertflow.data.sources.registry import fetch_source

if __name__ == "__main__":
    cli.run_stage(fetch_source)
