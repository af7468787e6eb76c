#!/usr/bin/env python3
"""Resolve every training setting, each with its reason, and predict memory, hours and dollars."""

import json
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import from_json, read_record, write_record
from expertflow.hardware.probe import resolve_gpu
from expertflow.plan.records import ModelFacts, PlanSpec
from expertflow.plan.resolve import plan_training
from expertflow.tokens.records import PackingRecord


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--packing", type=Path, required=True, help="packing.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--output", type=Path, required=True, help="plan.json to write")
    args = parser.parse_args()
    spec = cli.spec_from_text(PlanSpec, args.spec)
    model = json.loads(args.model.read_text(encoding="utf-8"))
    plan = plan_training(
        expert=args.expert,
        spec=spec,
        packing=read_record(PackingRecord, args.packing),
        facts=from_json(ModelFacts, model["facts"], where=str(args.model)),
        n_params=model["n_parameters"],
        gpu=resolve_gpu(spec.hardware, list(spec.gpu_table)),
    )
    write_record(args.output, plan)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
