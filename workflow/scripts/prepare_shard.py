#!/usr/bin/env python3
"""Validate and render one shard of a source into documents."""

import gc
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.prepare import prepare_shard
from expertflow.data.records import SourceRecord
from expertflow.data.settings import PrepareSpec
from expertflow.data.shards import plan_shards


def main() -> None:
    cli.without_pandas()
    parser = cli.parser(__doc__)
    parser.add_argument("--source", type=Path, required=True, help="record of the source")
    parser.add_argument("--shard", required=True, help="name of the shard, e.g. 000")
    parser.add_argument("--documents", type=Path, required=True, help="Arrow file to write")
    parser.add_argument("--rejected", type=Path, required=True, help="JSONL of rejects to write")
    parser.add_argument("--output", type=Path, required=True, help="record to write")
    args = parser.parse_args()
    spec = cli.spec_from_text(PrepareSpec, args.spec)
    if not spec.source.checks:
        # Records die young and hold no cycles: seldom looking saves a tenth of the time.
        # Parsers do leave cycles; with a check the same setting takes three times as long.
        gc.set_threshold(100_000)
    source = read_record(SourceRecord, args.source)
    plan = plan_shards(source.name, source.n_shards)[int(args.shard)]
    record = prepare_shard(
        spec=spec,
        source=source,
        plan=plan,
        output=args.documents,
        rejected=args.rejected,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
