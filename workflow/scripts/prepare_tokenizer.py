#!/usr/bin/env python3
"""Save the tokenizer and detect its model's chat format."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record
from expertflow.data.documents import iter_kept
from expertflow.data.layout import chatml_layout
from expertflow.data.records import ShardRecord
from expertflow.data.render import Renderer, training_texts
from expertflow.tokens.records import TokenizerSpec
from expertflow.tokens.tokenizer import prepare_tokenizer


def main() -> None:
    cli.without_pandas()
    job = cli.stage(
        __doc__,
        TokenizerSpec,
        shards={"type": Path, "nargs": "*", "default": [], "help": "shard records"},
        keep={"type": Path, "help": "keep-list; a builtin tokenizer learns from it"},
        directory="folder to write",
        output="tokenizer.json to write",
    )
    shards = [read_record(ShardRecord, path) for path in job.shards]
    documents = iter_kept(shards, job.keep) if job.keep else ()
    bodies = (document.body for document in documents if not document.held_out)
    texts = training_texts(Renderer(chatml_layout()), bodies)
    job.write(prepare_tokenizer(job.spec, texts, job.directory))


if __name__ == "__main__":
    cli.run(main)
