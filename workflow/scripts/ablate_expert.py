#!/usr/bin/env python3
"""Combine an expert's variants into ablation.json and its page: the gain of every switch."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.core.records import read_part
from expertflow.plan.records import TrainPlan
from expertflow.report.ablation_page import render_ablation
from expertflow.studies.ablation import join_ablation
from expertflow.studies.records import AblationRecord, AblationSpec, VariantRecord


def main(
    spec: AblationSpec, plan: TrainPlan, model: Path, variants: list[VariantRecord], html: Path
) -> AblationRecord:
    name = read_part(str, model, "name")
    record = join_ablation(spec, plan=plan, model=name, records=variants)
    write_text(html, render_ablation(record))
    return record


if __name__ == "__main__":
    cli.run_stage(main)
