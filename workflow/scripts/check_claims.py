#!/usr/bin/env python3
"""Check the claimed figures of a run for consistency; exit code 1 if they contradict each other.

For example:
    check_claims.py --steps 3558 --steps-per-second 1.25 --hours 47 --usd-per-hour 2.49
"""

import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record
from expertflow.plan.claims import check_claims
from expertflow.plan.cost import speed_of
from expertflow.plan.records import Claim, TrainPlan
from expertflow.plan.show import claim_line

FLAGS = {
    "n_steps": (int, "--steps", "optimizer steps"),
    "n_documents": (int, "--documents", "training examples"),
    "n_epochs": (float, "--epochs", "passes over them"),
    "batch_size": (int, "--batch-size", "examples a step"),
    "steps_per_s": (float, "--steps-per-second", "rate of the log"),
    "tokens_per_step": (float, "--tokens-per-step", "tokens of a step"),
    "duration": (str, "--duration", "time as a progress bar prints it, e.g. 46:47"),
    "hours": (float, "--hours", "hours that are claimed"),
    "usd_per_hour": (float, "--usd-per-hour", "price an hour"),
    "usd": (float, "--usd", "dollars that are claimed"),
    "n_saves": (int, "--saves", "checkpoints"),
    "n_saves_after": (int, "--saves-after", "checkpoints that would do"),
    "minutes_per_save": (float, "--minutes-per-save", "minutes of one"),
    "gain_percent": (float, "--gain-percent", "least that fewer are said to gain"),
    "n_warmup_steps": (int, "--warmup-steps", "warm-up steps that are claimed"),
    "warmup_ratio": (float, "--warmup-ratio", "their share of the steps, 0-1"),
    "warmup_steps_min": (int, "--warmup-steps-min", "their minimum"),
}


def main() -> None:
    parser = cli.parser(__doc__)
    for name, (kind, flag, words) in FLAGS.items():
        parser.add_argument(flag, dest=name, type=kind, help=words)
    parser.add_argument("--parts-hours", type=float, nargs="+", default=[], help="parts of them")
    parser.add_argument("--hardware", type=Path, metavar="PLAN", help="plan.json for the card")
    args = vars(parser.parse_args())
    path, parts = args.pop("hardware"), tuple(args.pop("parts_hours"))
    speed = path and speed_of(read_record(TrainPlan, path))
    claim = Claim(text="by hand", parts_hours=parts, hardware=speed and speed.hardware, **args)
    if not (checks := check_claims((claim,), speed)):
        parser.error("these figures cannot be held against each other; give at least two")
    print("\n".join(claim_line(check) for check in checks))
    sys.exit(not all(check.holds for check in checks))


if __name__ == "__main__":
    cli.run(main)
