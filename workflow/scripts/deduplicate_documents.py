#!/usr/bin/env python3
"""Drop duplicates across all shards of an expert and hold out documents for evaluation."""

from expertflow.core import cli
from expertflow.data.deduplicate import deduplicate_documents

if __name__ == "__main__":
    cli.without_pandas()
    cli.run_stage(deduplicate_documents)
