#!/usr/bin/env python3
"""Time a few real steps, a save and an evaluation of an expert to calibrate its plan."""

from expertflow.core import cli
from expertflow.studies.calibrate import CalibrationJob, calibrate

if __name__ == "__main__":
    cli.run_stage(calibrate, takes=CalibrationJob, interrupted="a calibration starts anew")
