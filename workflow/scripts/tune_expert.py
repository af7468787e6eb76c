#!/usr/bin/env python3
"""Search the fastest settings of an expert's training step on this machine."""

import logging

from expertflow.core import cli
from expertflow.plan.records import PlanSpec
from expertflow.studies.subprocess_runner import TrialRunner
from expertflow.studies.tune import MAX_S, TuneJob, tune

# A trial without a result by then hangs: loading and compiling a large model takes minutes.
LIMIT_S = 1800.0


def main() -> None:
    job = cli.stage(
        __doc__,
        PlanSpec,
        expert={"required": True},
        packing="packing.json",
        model="model.json",
        rows="folder of packed rows",
        scratch="folder to work in, removed",
        cache="folder of earlier trials",
        max_seconds={"type": float, "default": MAX_S, "help": "budget (%(default)g)"},
        output="tuning.json to write",
    )
    names = ("spec", "expert", "packing", "model", "rows", "scratch", "cache", "code")
    runner = TrialRunner(limit_s=max(LIMIT_S, job.max_seconds))
    record = tune(TuneJob(max_s=job.max_seconds, **job.pick(*names)), runner.run)
    if record.best is None:
        logging.warning("nothing could be run: a plan will leave this tuning out")
    job.write(record)


if __name__ == "__main__":
    cli.run(main, interrupted="the trials so far are kept")
