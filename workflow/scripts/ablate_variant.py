#!/usr/bin/env python3
"""Time one variant of an expert's plan against the plan, in pairs that take turns."""

import logging
import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import write_record
from expertflow.studies.ablate_variant import VariantJob, ablate_variant
from expertflow.studies.records import VariantSpec
from expertflow.train.run import Interrupted


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json")
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--shards", type=Path, nargs="*", default=[], help="document records")
    parser.add_argument("--keep", type=Path, help="keep.arrow, to tokenise in the loop")
    parser.add_argument("--staging", type=Path, help="staging.json, to compare read speeds")
    parser.add_argument("--scratch", type=Path, required=True, help="folder to work in, removed")
    parser.add_argument("--output", type=Path, required=True, help="record to write")
    args = parser.parse_args()
    names = ("expert", "plan", "packing", "model", "rows", "scratch", "keep", "staging")
    job = VariantJob(
        spec=cli.spec_from_text(VariantSpec, args.spec),
        shards=tuple(args.shards),
        **{name: getattr(args, name) for name in names},
    )
    try:
        record = ablate_variant(job)
    except Interrupted as interruption:
        logging.warning("%s; this variant starts anew", interruption)
        sys.exit(143)
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
