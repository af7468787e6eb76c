#!/usr/bin/env python3
"""Time one variant of an expert's plan against the plan, in alternating pairs."""

from expertflow.core import cli
from expertflow.core.records import read_record
from expertflow.hardware.card_locks import lock_cards
from expertflow.plan.records import TrainPlan
from expertflow.studies.records import VariantJob, VariantRecord


def main(job: VariantJob) -> VariantRecord:
    if read_record(TrainPlan, job.plan).gpu is not None:
        lock_cards(1)
    # It imports torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from expertflow.studies.ablate_variant import ablate_variant

    return ablate_variant(job)


if __name__ == "__main__":
    cli.run_stage(main, takes=VariantJob, interrupted="this variant starts over")
