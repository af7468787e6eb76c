#!/usr/bin/env python3
"""Time a few real steps, a save and an evaluation of an expert, for its plan to go by."""

import logging
import sys
import time
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import write_record
from expertflow.plan.records import PlanSpec
from expertflow.studies.calibrate import CalibrationJob, calibrate
from expertflow.studies.planned import import_code, planned
from expertflow.train.run import Interrupted


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--scratch", type=Path, required=True, help="folder to work in, removed")
    parser.add_argument("--tuning", type=Path, help="tuning.json, where the manifest names one")
    parser.add_argument("--output", type=Path, required=True, help="calibration.json to write")
    args = parser.parse_args()
    spec = cli.spec_from_text(PlanSpec, args.spec)
    import_code(args.model, spec)
    began_s = time.perf_counter()
    told = {key: getattr(args, key) for key in ("expert", "packing", "model", "tuning")}
    plan = planned(spec=spec, **told)
    paths = {key: getattr(args, key) for key in ("packing", "model", "rows", "scratch")}
    try:
        result = calibrate(CalibrationJob(plan=plan, code=args.code, began_s=began_s, **paths))
    except Interrupted as interruption:
        logging.warning("%s; a calibration starts anew", interruption)
        sys.exit(143)
    if result is not None:
        write_record(args.output, result)
        cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
