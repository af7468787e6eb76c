#!/usr/bin/env python3
"""Pack an expert's token shards into rows of one length."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.tokens.pack import pack_sequences
from expertflow.tokens.records import PackingSpec, TokenShardRecord


def main() -> None:
    cli.without_pandas()
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="token records")
    parser.add_argument("--keep", type=Path, required=True, help="keep-list")
    parser.add_argument("--directory", type=Path, required=True, help="folder of rows to write")
    parser.add_argument("--output", type=Path, required=True, help="packing.json to write")
    args = parser.parse_args()
    record = pack_sequences(
        expert=args.expert,
        spec=cli.spec_from_text(PackingSpec, args.spec),
        shards=[read_record(TokenShardRecord, path) for path in args.shards],
        keep=args.keep,
        output=args.directory,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
