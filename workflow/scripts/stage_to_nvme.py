#!/usr/bin/env python3
"""Copy packed rows and base weights to a fast local disk, or say why not."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_part, read_record, write_record
from expertflow.staging.content import read_content, rows_key, weights_key
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import PackingRecord


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--output", type=Path, required=True, help="staging.json to write")
    args = parser.parse_args()
    packing = read_record(PackingRecord, args.packing)
    base = Path(read_part(str, args.model, "path"))
    weights_sha256 = read_part(str, args.model, "weights_sha256")
    record = plan_staging(
        expert=args.expert,
        spec=cli.spec_from_text(StageSpec, args.spec),
        rows=read_content(
            "rows", args.rows, rows_key(packing.train.sha256, packing.held_out.sha256)
        ),
        weights=read_content("weights", base, weights_key(base, weights_sha256)),
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
