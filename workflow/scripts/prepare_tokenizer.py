#!/usr/bin/env python3
"""Save the tokenizer and detect its model's chat format."""

from collections.abc import Sequence
from pathlib import Path

from expertflow.core import cli
from expertflow.data.documents import iter_kept
from expertflow.data.layout import chatml_layout
from expertflow.data.records import ShardRecord
from expertflow.data.render import Renderer, iter_training_texts
from expertflow.tokens.records import TokenizerRecord, TokenizerSpec
from expertflow.tokens.tokenizer import prepare_tokenizer


def main(
    spec: TokenizerSpec,
    directory: Path,
    shards: Sequence[ShardRecord] = (),
    keep: Path | None = None,
) -> TokenizerRecord:
    documents = iter_kept(shards, keep) if keep else ()
    bodies = (document.body for document in documents if not document.held_out)
    texts = iter_training_texts(Renderer(chatml_layout()), bodies)
    return prepare_tokenizer(spec, texts, directory)


if __name__ == "__main__":
    cli.without_pandas()
    cli.run_stage(main)
