#!/usr/bin/env python3
"""Drop repeats over all shards of an expert and hold documents out for evaluation."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.deduplicate import deduplicate_documents
from expertflow.data.records import ShardRecord
from expertflow.data.settings import DeduplicateSpec


def main() -> None:
    cli.without_pandas()
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="shard records")
    parser.add_argument("--keep", type=Path, required=True, help="Arrow keep-list to write")
    parser.add_argument("--output", type=Path, required=True, help="documents.json to write")
    args = parser.parse_args()
    record = deduplicate_documents(
        expert=args.expert,
        spec=cli.spec_from_text(DeduplicateSpec, args.spec),
        shards=[read_record(ShardRecord, path) for path in args.shards],
        keep=args.keep,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
