#!/usr/bin/env python3
"""Join all records of an expert into the receipt: report.json, checked, and report.html."""

import json
from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.data.shards import token_shards
from expertflow.report.build import build_report
from expertflow.report.check.report import check_report, read_schema
from expertflow.report.inputs import ReportPaths, read_inputs
from expertflow.report.page import render_page
from expertflow.report.provenance import collect_provenance
from expertflow.report.records import ReportSpec

SCHEMA = Path(__file__).resolve().parents[1] / "schemas" / "report.schema.yaml"


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of the records")
    parser.add_argument("--json", type=Path, required=True, help="report.json to write")
    parser.add_argument("--html", type=Path, required=True, help="report.html to write")
    parser.add_argument("--ablation", type=Path, help="ablation.json, where one was asked for")
    args = parser.parse_args()
    spec = cli.spec_from_text(ReportSpec, args.spec)
    inputs = read_inputs(spec, ReportPaths.in_folder(args.results), ablation=args.ablation)
    also = [args.ablation.name] if args.ablation else []
    provenance = collect_provenance(args.results, token_shards, also=also)
    report = build_report(inputs, provenance)
    check_report(report, read_schema(SCHEMA), inputs)
    write_text(args.html, render_page(report, inputs))
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(args.json, text + "\n")
    cli.write_sidecar(args.json, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
