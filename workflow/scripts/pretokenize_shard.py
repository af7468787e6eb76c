#!/usr/bin/env python3
"""Tokenize some shards of a source, or take their tokens from the store."""

from expertflow.core import cli
from expertflow.data.records import ShardRecord
from expertflow.tokens.records import TokenizerRecord, TokenSpec
from expertflow.tokens.shard import pretokenize_shard


def main() -> None:
    cli.without_pandas()
    job = cli.stage(
        __doc__,
        TokenSpec,
        name={"required": True, "help": "name of the token shard"},
        shards=[ShardRecord],
        tokenizer=TokenizerRecord,
        store="folder of tokens made before",
        ids="file of token ids to write",
        index="Arrow index to write",
        output="record to write",
    )
    named = job.pick("name", "spec", "code", "shards", "tokenizer", "store", "ids", "index")
    job.write(pretokenize_shard(**named))


if __name__ == "__main__":
    cli.run(main)
