#!/usr/bin/env python3
"""Show a plan: every setting with its reason, memory, hours, dollars, other hardware, claims.

For example:
    show_plan.py results/expert-sql/plan.json
"""

import argparse
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.plan.show import plan_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, nargs="+", help="plan.json of an expert")
    args = parser.parse_args()
    print("\n\n".join(plan_text(read_record(TrainPlan, path)) for path in args.plan))


if __name__ == "__main__":
    cli.run(main)
