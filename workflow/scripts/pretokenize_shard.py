#!/usr/bin/env python3
"""Tokenise the documents of some shards of a source, or take their tokens from the store."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_part, read_record, write_record
from expertflow.data.records import Layout, ShardRecord
from expertflow.tokens.records import TokenSpec
from expertflow.tokens.shard import pretokenize_shard


def main() -> None:
    cli.without_pandas()
    parser = cli.parser(__doc__)
    parser.add_argument("--name", required=True, help="name of the token shard")
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="document records")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--store", type=Path, required=True, help="folder of tokens made before")
    parser.add_argument("--ids", type=Path, required=True, help="file of token ids to write")
    parser.add_argument("--index", type=Path, required=True, help="Arrow index to write")
    parser.add_argument("--output", type=Path, required=True, help="record to write")
    args = parser.parse_args()
    record = pretokenize_shard(
        name=args.name,
        spec=cli.spec_from_text(TokenSpec, args.spec),
        code=args.code,
        shards=[read_record(ShardRecord, path) for path in args.shards],
        tokenizer=Path(read_part(str, args.model, "path")),
        layout=read_part(Layout, args.model, "layout"),
        store=args.store,
        ids=args.ids,
        index=args.index,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
