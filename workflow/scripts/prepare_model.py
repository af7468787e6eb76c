#!/usr/bin/env python3
"""Store the base model on disk, with hashes."""

from expertflow.core import cli
from expertflow.tokens.records import TokenizerRecord
from expertflow.train.model.base import prepare_model
from expertflow.train.records import ModelSpec


def main() -> None:
    job = cli.stage(
        __doc__,
        ModelSpec,
        tokenizer=TokenizerRecord,
        directory="where a builtin model goes",
        output="model.json to write",
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    job.write(prepare_model(job.spec, job.tokenizer, job.directory))


if __name__ == "__main__":
    cli.run(main)
