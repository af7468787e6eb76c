#!/usr/bin/env python3
"""Copy packed rows to a fast local disk, or say why not."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import sha256_json
from expertflow.core.records import read_record, write_record
from expertflow.stage.copy import plan_staging
from expertflow.stage.records import StageSpec
from expertflow.tokens.records import PackingRecord


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--output", type=Path, required=True, help="staging.json to write")
    args = parser.parse_args()
    packing = read_record(PackingRecord, args.packing)
    record = plan_staging(
        expert=args.expert,
        spec=cli.spec_from_text(StageSpec, args.spec),
        source=args.rows,
        key=sha256_json([packing.train.sha256, packing.held_out.sha256])[:20],
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
