#!/usr/bin/env python3
"""Tokenise the kept documents of one shard."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_part, read_record, write_record
from expertflow.data.records import Layout, ShardRecord
from expertflow.tokens.shard import pretokenize_shard


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--shard", type=Path, required=True, help="record of the shard")
    parser.add_argument("--keep", type=Path, required=True, help="keep-list")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--tokens", type=Path, required=True, help="Arrow file to write")
    parser.add_argument("--output", type=Path, required=True, help="record to write")
    args = parser.parse_args()
    record = pretokenize_shard(
        shard=read_record(ShardRecord, args.shard),
        keep=args.keep,
        tokenizer=Path(read_part(str, args.model, "path")),
        layout=read_part(Layout, args.model, "layout"),
        output=args.tokens,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
