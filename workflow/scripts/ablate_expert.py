#!/usr/bin/env python3
"""Join an expert's variants to what every switch is worth here: ablation.json and its page."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.core.records import read_part, read_record, write_record
from expertflow.plan.records import TrainPlan
from expertflow.report.ablation.page import render_ablation
from expertflow.studies.ablate import Measured, ablation
from expertflow.studies.records import AblationSpec, VariantRecord


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--variants", type=Path, nargs="+", required=True, help="their records")
    parser.add_argument("--json", type=Path, required=True, help="ablation.json to write")
    parser.add_argument("--html", type=Path, required=True, help="ablation.html to write")
    args = parser.parse_args()
    measured = Measured(
        expert=args.expert,
        plan=read_record(TrainPlan, args.plan),
        model=read_part(str, args.model, "name"),
        records=tuple(read_record(VariantRecord, path) for path in args.variants),
    )
    record = ablation(cli.spec_from_text(AblationSpec, args.spec), measured)
    write_text(args.html, render_ablation(record))
    write_record(args.json, record)
    cli.write_sidecar(args.json, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
