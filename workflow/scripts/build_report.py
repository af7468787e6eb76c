#!/usr/bin/env python3
"""Build an expert's report.json from all records, check it, and render report.html."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.inputs import read_inputs
from expertflow.report.measured import to_plain
from expertflow.report.page import render_page
from expertflow.report.provenance import collect_provenance
from expertflow.report.records import ReportSpec


def main(
    spec: ReportSpec, results: Path, html: Path, ledger: Path, ablation: Path | None = None
) -> dict[str, object]:
    inputs = read_inputs(spec, results, ledger=ledger, ablation=ablation)
    report = build_report(inputs, collect_provenance(results, asked=inputs.asked))
    check_report(report, inputs)
    write_text(html, render_page(report, inputs))
    plain: dict[str, object] = to_plain(report)[0]
    return plain


if __name__ == "__main__":
    cli.run_stage(main)
