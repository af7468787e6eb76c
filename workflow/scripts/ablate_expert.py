#!/usr/bin/env python3
"""Combine an expert's variants into ablation.json and its page: the gain of every switch."""

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.core.records import read_part
from expertflow.plan.records import TrainPlan
from expertflow.report.ablation_page import render_ablation
from expertflow.studies.ablation import join_ablation
from expertflow.studies.records import AblationSpec, VariantRecord


def main() -> None:
    job = cli.stage(
        __doc__,
        AblationSpec,
        plan=TrainPlan,
        model="model.json",
        variants=[VariantRecord],
        json="ablation.json to write",
        html="ablation.html to write",
    )
    model = read_part(str, job.model, "name")
    record = join_ablation(job.spec, plan=job.plan, model=model, records=job.variants)
    write_text(job.html, render_ablation(record))
    job.write(record, job.json)


if __name__ == "__main__":
    cli.run(main)
