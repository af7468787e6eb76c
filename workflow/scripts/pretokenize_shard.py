#!/usr/bin/env python3
"""Tokenize some shards of a source, or take their tokens from the store."""

from expertflow.core import cli
from expertflow.tokens.shard import pretokenize_shard

if __name__ == "__main__":
    cli.without_pandas()
    cli.run_stage(pretokenize_shard)
