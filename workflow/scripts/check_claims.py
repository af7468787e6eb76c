#!/usr/bin/env python3
"""Check the claimed figures of a run for consistency; exit code 1 if they contradict each other.

For example:
    check_claims.py --steps 3558 --steps-per-second 1.25 --hours 47 --usd-per-hour 2.49
"""

import sys
from typing import get_args

from expertflow.config.validate import check
from expertflow.core import cli
from expertflow.core.records import from_json
from expertflow.core.settings import json_schema, list_settings
from expertflow.plan.claims import check_claims
from expertflow.plan.records import Claim, Precision
from expertflow.plan.show import claim_line


def main() -> None:
    parser = cli.parser(__doc__)
    for claimed in list_settings(Claim):
        name = claimed.name.removeprefix("n_")
        if name.endswith("_per_s"):
            name += "econd"
        flag = f"--{name.replace('_', '-')}"
        if claimed.kind in (int, float) or name == "duration":
            parser.add_argument(flag, dest=claimed.name, type=claimed.kind, help=claimed.text)
    parser.add_argument(
        "--parts-hours", type=float, nargs="+", default=[], help="parts that add up to them"
    )
    parser.add_argument(
        "--speedups", type=float, nargs="+", default=[], help="factors, except TF32's"
    )
    parser.add_argument("--precision", choices=get_args(Precision), help="TF32 only affects fp32")
    figures = {"text": "by hand", **vars(parser.parse_args())}
    check(figures, json_schema(Claim), where="claim")
    checks = check_claims((from_json(Claim, figures, where="claim"),))
    if not checks:
        parser.error("these figures cannot be checked against each other; pass at least two")
    print("\n".join(claim_line(check) for check in checks))
    sys.exit(not all(check.holds for check in checks))


if __name__ == "__main__":
    cli.run(main)
