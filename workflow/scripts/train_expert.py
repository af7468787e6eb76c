#!/usr/bin/env python3
"""Train an expert by its plan, resuming from its state if there is one."""

import logging
import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.train.job import TrainingJob, run_job
from expertflow.train.loop import Interrupted
from expertflow.train.on_the_fly import Documents


def main() -> None:
    parser = cli.parser(__doc__)
    for name in ("plan", "packing", "model", "staging"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"{name}.json")
    parser.add_argument("--state", type=Path, required=True, help="directory that outlives the job")
    parser.add_argument("--checkpoint", type=Path, required=True, help="model to publish")
    parser.add_argument("--output", type=Path, required=True, help="training.json to write")
    by_hand = parser.add_argument_group("by hand, to go on where the packed rows are missing")
    by_hand.add_argument("--shards", type=Path, nargs="+", help="records of the documents' shards")
    by_hand.add_argument("--keep", type=Path, help="keep-list")
    args = parser.parse_args()
    if (args.shards is None) != (args.keep is None):
        parser.error("--shards and --keep go together")
    job = TrainingJob(
        plan=args.plan,
        packing=args.packing,
        model=args.model,
        staging=args.staging,
        state=args.state,
        checkpoint=args.checkpoint,
        output=args.output,
        code=args.code,
        documents=args.keep and Documents(shards=tuple(args.shards), keep=args.keep),
    )
    try:
        run_job(job)
    except Interrupted as interruption:
        logging.warning("%s; run again to resume", interruption)
        sys.exit(143)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
