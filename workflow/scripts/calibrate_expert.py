#!/usr/bin/env python3
"""Time a few real steps, a save and an evaluation of an expert to calibrate its plan."""

from expertflow.core import cli
from expertflow.hardware.card_locks import lock_cards
from expertflow.plan.records import Calibration
from expertflow.studies.plan_expert import CalibrationJob


def main(job: CalibrationJob) -> Calibration | None:
    if job.spec.hardware != "cpu":
        lock_cards(job.spec.world_size)
    # It imports torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from expertflow.studies.calibrate import calibrate

    return calibrate(job)


if __name__ == "__main__":
    cli.run_stage(main, takes=CalibrationJob, interrupted="the calibration starts over")
