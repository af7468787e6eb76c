#!/usr/bin/env python3
"""Build an expert's report.json from all records, check it, and render report.html."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.inputs import read_inputs
from expertflow.report.page import render_page
from expertflow.report.provenance import collect_provenance
from expertflow.report.records import ReportSpec


def main() -> None:
    job = cli.stage(
        __doc__,
        ReportSpec,
        results="folder of the records",
        json="report.json to write",
        html="report.html to write",
        ablation={"type": Path, "help": "ablation.json, where one was asked for"},
    )
    inputs = read_inputs(job.spec, job.results, ablation=job.ablation)
    asked = {"calibrate": inputs.plan.cost.calibrated, "ablate": job.ablation is not None}
    asked_for = [name for name, is_asked in asked.items() if is_asked]
    report = build_report(inputs, collect_provenance(job.results, asked=asked_for))
    check_report(report, inputs)
    write_text(job.html, render_page(report, inputs))
    job.write(report, job.json)


if __name__ == "__main__":
    cli.run(main)
