#!/usr/bin/env python3
"""Validate one shard of a source and render it into documents."""

import gc

from expertflow.core import cli
from expertflow.data.prepare import prepare_shard
from expertflow.data.records import SourceRecord
from expertflow.data.settings import PrepareSpec


def main() -> None:
    cli.without_pandas()
    job = cli.stage(
        __doc__,
        PrepareSpec,
        source=SourceRecord,
        shard={"required": True, "help": "name of the shard, e.g. 000"},
        documents="Arrow file to write",
        rejected="JSONL of rejects to write",
        output="record to write",
    )
    if not job.spec.source.checks:
        # Records are short-lived and have no cycles: rare collection saves a tenth of the time.
        # Parsers do leave cycles; with a check the same setting takes three times as long.
        gc.set_threshold(100_000)
    given = job.pick("spec", "source", "shard", "rejected")
    job.write(prepare_shard(**given, output=job.documents))


if __name__ == "__main__":
    cli.run(main)
