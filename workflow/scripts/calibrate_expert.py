#!/usr/bin/env python3
"""Time a few real steps, a save and an evaluation of an expert to calibrate its plan."""

import time
from pathlib import Path

from expertflow.core import cli
from expertflow.plan.records import PlanSpec
from expertflow.studies.calibrate import CalibrationJob, calibrate
from expertflow.studies.plan_expert import import_code, plan_expert


def main() -> None:
    job = cli.stage(
        __doc__,
        PlanSpec,
        expert={"required": True},
        packing="packing.json",
        model="model.json",
        rows="folder of packed rows",
        scratch="folder to work in, removed",
        tuning={"type": Path, "help": "tuning.json, where the manifest names one"},
        output="calibration.json to write",
    )
    import_code(job.model, job.spec)
    began_s = time.perf_counter()
    plan = plan_expert(**job.pick("spec", "expert", "packing", "model", "tuning"))
    paths = job.pick("packing", "model", "rows", "scratch", "code")
    result = calibrate(CalibrationJob(plan=plan, began_s=began_s, **paths))
    if result is not None:
        job.write(result)


if __name__ == "__main__":
    cli.run(main, interrupted="a calibration starts anew")
