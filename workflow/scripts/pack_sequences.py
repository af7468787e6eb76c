#!/usr/bin/env python3
"""Pack an expert's token shards into rows of one length."""

from expertflow.core import cli
from expertflow.tokens.pack import pack_sequences
from expertflow.tokens.records import PackingSpec, TokenShardRecord


def main() -> None:
    cli.without_pandas()
    job = cli.stage(
        __doc__,
        PackingSpec,
        expert={"required": True},
        shards=[TokenShardRecord],
        keep="keep-list",
        directory="folder of rows to write",
        output="packing.json to write",
    )
    given = job.pick("expert", "spec", "shards", "keep")
    job.write(pack_sequences(**given, output=job.directory))


if __name__ == "__main__":
    cli.run(main)
