#!/usr/bin/env python3
"""Time a few real steps, a save and an evaluation of an expert to calibrate its plan."""

import time
from pathlib import Path

from expertflow.core import cli
from expertflow.plan.records import Calibration, PlanSpec
from expertflow.studies.calibrate import CalibrationJob, calibrate
from expertflow.studies.plan_expert import import_code, plan_expert


def main(
    spec: PlanSpec,
    expert: str,
    packing: Path,
    model: Path,
    rows: Path,
    scratch: Path,
    code: str,
    tuning: Path | None = None,
) -> Calibration | None:
    import_code(model, spec)
    began_s = time.perf_counter()
    plan = plan_expert(expert=expert, spec=spec, packing=packing, model=model, tuning=tuning)
    job = CalibrationJob(
        plan=plan,
        packing=packing,
        model=model,
        rows=rows,
        scratch=scratch,
        code=code,
        began_s=began_s,
    )
    return calibrate(job)


if __name__ == "__main__":
    cli.run_stage(main, interrupted="a calibration starts anew")
