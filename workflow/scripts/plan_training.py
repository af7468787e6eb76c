#!/usr/bin/env python3
"""Resolve every training setting, each with its reason, and predict memory, hours and dollars."""

import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.plan.records import PlanSpec
from expertflow.plan.show import plan_text
from expertflow.studies.plan_expert import plan_expert


def main() -> None:
    job = cli.stage(
        __doc__,
        PlanSpec,
        expert={"required": True},
        packing="packing.json",
        model="model.json",
        calibration={"type": Path, "help": "calibration.json, where there is one"},
        tuning={"type": Path, "help": "tuning.json, where the manifest names one"},
        output="plan.json to write",
    )
    plan = plan_expert(**job.pick("expert", "spec", "packing", "model", "calibration", "tuning"))
    job.write(plan)
    print(plan_text(plan), file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
