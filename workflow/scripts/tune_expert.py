#!/usr/bin/env python3
"""Find the fastest settings of an expert's training step on this machine."""

import logging

from expertflow.core import cli
from expertflow.hardware.card_locks import lock_cards
from expertflow.plan.tuned import TuningRecord
from expertflow.studies.plan_expert import TuneJob


def main(job: TuneJob) -> TuningRecord:
    if job.spec.hardware != "cpu":
        lock_cards(1)
    # They import torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from expertflow.studies.subprocess_runner import LIMIT_S, TrialRunner
        from expertflow.studies.tune import tune

    runner = TrialRunner(limit_s=max(LIMIT_S, job.max_seconds))
    record = tune(job, runner.run)
    if record.best is None:
        logging.warning("no trial could run: a plan will ignore this tuning")
    return record


if __name__ == "__main__":
    cli.run_stage(main, takes=TuneJob, interrupted="the trials so far are kept")
