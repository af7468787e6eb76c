#!/usr/bin/env python3
"""Validate one shard of a source and render it into documents."""

import gc
from pathlib import Path

from expertflow.core import cli
from expertflow.data.prepare import prepare_shard
from expertflow.data.records import ShardRecord, SourceRecord
from expertflow.data.settings import PrepareSpec


def main(
    spec: PrepareSpec, source: SourceRecord, shard: str, documents: Path, rejected: Path
) -> ShardRecord:
    if not spec.source.checks:
        # Records are short-lived and have no cycles: rare collection saves a tenth of the time.
        # Parsers do leave cycles; with a check the same setting takes three times as long.
        gc.set_threshold(100_000)
    return prepare_shard(spec=spec, source=source, shard=shard, output=documents, rejected=rejected)


if __name__ == "__main__":
    cli.without_pandas()
    cli.run_stage(main)
