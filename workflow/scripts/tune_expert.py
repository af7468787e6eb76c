#!/usr/bin/env python3
"""Search the fastest settings of an expert's training step on this machine."""

import logging
import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import write_record
from expertflow.plan.records import PlanSpec
from expertflow.studies.apart import Trials
from expertflow.studies.tune import MAX_S, TuneJob, tune
from expertflow.train.run import Interrupted

# A trial without a result by then hangs: loading a large model and compiling it take minutes.
LIMIT_S = 1800.0


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--scratch", type=Path, required=True, help="folder to work in, removed")
    parser.add_argument("--cache", type=Path, required=True, help="folder of earlier trials")
    parser.add_argument("--max-seconds", type=float, default=MAX_S, help="budget (%(default)g)")
    parser.add_argument("--output", type=Path, required=True, help="tuning.json to write")
    args = parser.parse_args()
    job = TuneJob(
        spec=cli.spec_from_text(PlanSpec, args.spec),
        max_s=args.max_seconds,
        **{
            key: getattr(args, key)
            for key in ("expert", "packing", "model", "rows", "scratch", "cache", "code")
        },
    )
    try:
        record = tune(job, Trials(limit_s=max(LIMIT_S, args.max_seconds)).run)
    except Interrupted as interruption:
        logging.warning("%s; the trials so far are kept", interruption)
        sys.exit(143)
    if record.best is None:
        logging.warning("nothing could be run: a plan will leave this tuning out")
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
