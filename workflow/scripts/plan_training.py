#!/usr/bin/env python3
"""Resolve every training setting, each with its reason, and predict memory, hours and dollars."""

import sys

from expertflow.core import cli
from expertflow.plan.records import TrainPlan
from expertflow.plan.show import plan_text
from expertflow.studies.plan_expert import PlanJob, plan_expert


def main(job: PlanJob) -> TrainPlan:
    plan = plan_expert(job, calibration=job.calibration, tuning=job.tuning)
    print(plan_text(plan), file=sys.stderr)
    return plan


if __name__ == "__main__":
    cli.run_stage(main, takes=PlanJob)
