#!/usr/bin/env python3
"""List an expert's data sets: where they are, how large, under which licence; plan the shards."""

import json
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.find import find_datasets
from expertflow.data.records import ExpertLock, SourceRecord


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--lock", type=Path, required=True, help="sources.lock.json")
    parser.add_argument("--sources", type=Path, nargs="+", required=True, help="source records")
    parser.add_argument("--output", type=Path, required=True, help="datasets.json to write")
    args = parser.parse_args()
    spec = json.loads(args.spec)
    manifest = find_datasets(
        expert=spec["expert"],
        preset=spec["preset"],
        lock=read_record(ExpertLock, args.lock),
        sources=[read_record(SourceRecord, path) for path in args.sources],
    )
    write_record(args.output, manifest)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
