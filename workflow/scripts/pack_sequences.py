#!/usr/bin/env python3
"""Pack an expert's token shards into rows of one length."""

from expertflow.core import cli
from expertflow.tokens.pack import pack_sequences

if __name__ == "__main__":
    cli.without_pandas()
    cli.run_stage(pack_sequences)
