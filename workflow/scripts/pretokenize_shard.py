#!/usr/bin/env python3
"""Tokenise the documents of some shards of a source, or take their tokens from the store."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_part
from expertflow.data.records import Layout, ShardRecord
from expertflow.tokens.records import TokenSpec
from expertflow.tokens.shard import pretokenize_shard


def main() -> None:
    cli.without_pandas()
    job = cli.stage(
        __doc__,
        TokenSpec,
        name={"required": True, "help": "name of the token shard"},
        shards=[ShardRecord],
        model="model.json",
        store="folder of tokens made before",
        ids="file of token ids to write",
        index="Arrow index to write",
        output="record to write",
    )
    record = pretokenize_shard(
        **job.pick("name", "spec", "code", "shards", "store", "ids", "index"),
        tokenizer=Path(read_part(str, job.model, "path")),
        layout=read_part(Layout, job.model, "layout"),
    )
    job.write(record)


if __name__ == "__main__":
    cli.run(main)
