#!/usr/bin/env python3
"""Write the model that people load: merged, checked, with tokenizer and model card."""

import json
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import EvaluationRecord
from expertflow.export.card import card_facts
from expertflow.export.merge import ATTENTION, export_model
from expertflow.tokens.arrow import read_rows
from expertflow.train.load import load_for_export
from expertflow.train.records import ModelRecord, TrainingRecord


def main() -> None:
    parser = cli.parser(__doc__)
    for name in ("datasets", "model", "training", "evaluation"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"{name}.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="trained model")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--directory", type=Path, required=True, help="folder to write")
    parser.add_argument("--output", type=Path, required=True, help="export.json to write")
    args = parser.parse_args()
    spec = json.loads(args.spec)
    model = read_record(ModelRecord, args.model)
    training = read_record(TrainingRecord, args.training)
    record = export_model(
        expert=spec["expert"],
        load_model=lambda: load_for_export(
            args.checkpoint,
            base=model.path,
            method=training.method,
            precision=training.precision,
            attention_name=ATTENTION,
        ),
        checkpoint=args.checkpoint,
        rows=read_rows(args.rows / "held_out"),
        tokenizer=Path(model.path),
        layout=model.layout,
        decoding=spec["decoding"],
        card=card_facts(
            description=spec["description"],
            datasets=read_record(DatasetManifest, args.datasets),
            model=model,
            training=training,
            evaluation=read_record(EvaluationRecord, args.evaluation),
        ),
        output=args.directory,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
