#!/usr/bin/env python3
"""Put the base model and its tokenizer on disk, with hashes."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record
from expertflow.data.documents import iter_kept
from expertflow.data.layout import chatml_layout
from expertflow.data.records import ShardRecord
from expertflow.data.render import Renderer, training_texts
from expertflow.train.model.base import prepare_model
from expertflow.train.records import ModelSpec


def main() -> None:
    job = cli.stage(
        __doc__,
        ModelSpec,
        shards={"type": Path, "nargs": "*", "default": [], "help": "shard records"},
        keep={"type": Path, "help": "keep-list; a builtin tokenizer learns from it"},
        directory="where a builtin model goes",
        output="model.json to write",
    )
    shards = [read_record(ShardRecord, path) for path in job.shards]
    documents = iter_kept(shards, job.keep) if job.keep else ()
    bodies = (document.body for document in documents if not document.held_out)
    texts = training_texts(Renderer(chatml_layout()), bodies)
    job.directory.mkdir(parents=True, exist_ok=True)
    job.write(prepare_model(job.spec, texts, job.directory))


if __name__ == "__main__":
    cli.run(main)
