#!/usr/bin/env python3
"""Resolve every training setting, each with its reason, and predict memory, hours and dollars."""

import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.plan.records import PlanSpec, TrainPlan
from expertflow.plan.show import plan_text
from expertflow.studies.plan_expert import plan_expert


def main(
    spec: PlanSpec,
    expert: str,
    packing: Path,
    model: Path,
    calibration: Path | None = None,
    tuning: Path | None = None,
) -> TrainPlan:
    plan = plan_expert(
        expert=expert,
        spec=spec,
        packing=packing,
        model=model,
        calibration=calibration,
        tuning=tuning,
    )
    print(plan_text(plan), file=sys.stderr)
    return plan


if __name__ == "__main__":
    cli.run_stage(main)
