#!/usr/bin/env python3
"""Join an expert's variants to what every switch is worth here: ablation.json and its page."""

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.core.records import read_part
from expertflow.plan.records import TrainPlan
from expertflow.report.ablation_page import render_ablation
from expertflow.studies.ablation import Measured, join_ablation
from expertflow.studies.records import AblationSpec, VariantRecord


def main() -> None:
    job = cli.stage(
        __doc__,
        AblationSpec,
        expert={"required": True},
        plan=TrainPlan,
        model="model.json",
        variants=[VariantRecord],
        json="ablation.json to write",
        html="ablation.html to write",
    )
    measured = Measured(
        expert=job.expert,
        plan=job.plan,
        model=read_part(str, job.model, "name"),
        records=tuple(job.variants),
    )
    record = join_ablation(job.spec, measured)
    write_text(job.html, render_ablation(record))
    job.write(record, job.json)


if __name__ == "__main__":
    cli.run(main)
