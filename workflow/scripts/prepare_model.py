#!/usr/bin/env python3
"""Put the base model and its tokenizer on disk, with hashes."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.documents import iter_kept
from expertflow.data.layout import chatml_layout
from expertflow.data.records import ShardRecord
from expertflow.data.render import Renderer, training_texts
from expertflow.train.model.base import prepare_model
from expertflow.train.records import ModelSpec


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--shards", type=Path, nargs="*", default=[], help="shard records")
    parser.add_argument("--keep", type=Path, help="keep-list; a builtin tokenizer learns from it")
    parser.add_argument("--directory", type=Path, required=True, help="where a builtin model goes")
    parser.add_argument("--output", type=Path, required=True, help="model.json to write")
    args = parser.parse_args()
    shards = [read_record(ShardRecord, path) for path in args.shards]
    renderer = Renderer(chatml_layout())
    documents = iter_kept(shards, args.keep) if args.keep else ()
    texts = training_texts(renderer, (d.body for d in documents if not d.held_out))
    spec = cli.spec_from_text(ModelSpec, args.spec)
    args.directory.mkdir(parents=True, exist_ok=True)
    write_record(args.output, prepare_model(spec, texts, args.directory))
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
