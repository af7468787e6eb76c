#!/usr/bin/env python3
"""Drop duplicates across all shards of an expert and hold out documents for evaluation."""

from expertflow.core import cli
from expertflow.data.deduplicate import deduplicate_documents
from expertflow.data.records import ShardRecord
from expertflow.data.settings import DeduplicateSpec


def main() -> None:
    cli.without_pandas()
    job = cli.stage(
        __doc__,
        DeduplicateSpec,
        expert={"required": True},
        shards=[ShardRecord],
        keep="Arrow keep-list to write",
        output="documents.json to write",
    )
    job.write(deduplicate_documents(**job.pick("expert", "spec", "shards", "keep")))


if __name__ == "__main__":
    cli.run(main)
