#!/usr/bin/env python3
"""Resolve every training setting, each with its reason, and predict memory, hours and dollars."""

import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import write_record
from expertflow.plan.records import PlanSpec
from expertflow.plan.show import plan_text
from expertflow.studies.planned import planned


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--calibration", type=Path, help="calibration.json, where there is one")
    parser.add_argument("--tuning", type=Path, help="tuning.json, where the manifest names one")
    parser.add_argument("--output", type=Path, required=True, help="plan.json to write")
    args = parser.parse_args()
    plan = planned(
        expert=args.expert,
        spec=cli.spec_from_text(PlanSpec, args.spec),
        packing=args.packing,
        model=args.model,
        calibration=args.calibration,
        tuning=args.tuning,
    )
    write_record(args.output, plan)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)
    print(plan_text(plan), file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
