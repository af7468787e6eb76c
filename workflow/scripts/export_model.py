#!/usr/bin/env python3
"""Write the model that people load: merged, checked, with tokenizer and model card."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import EvaluationRecord
from expertflow.export.card import CardInputs, Exported, model_card
from expertflow.export.merge import Trained, export_model
from expertflow.export.merge_files import hide_cards, published_folder
from expertflow.export.records import ExportSpec
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.train.records import ModelRecord, TrainingRecord

RECORDS = {
    "datasets": DatasetManifest, "model": ModelRecord, "plan": TrainPlan,
    "training": TrainingRecord, "monitor": MonitorRecord, "evaluation": EvaluationRecord,
}  # fmt: skip


def main() -> None:
    hide_cards()
    parser = cli.parser(__doc__)
    for name in RECORDS:
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"{name}.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="trained model")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--directory", type=Path, required=True, help="folder to write")
    parser.add_argument("--output", type=Path, required=True, help="export.json to write")
    args = parser.parse_args()
    inputs = CardInputs(
        spec=cli.spec_from_text(ExportSpec, args.spec),
        code=args.code,
        **{name: read_record(cls, getattr(args, name)) for name, cls in RECORDS.items()},
    )
    published = inputs.evaluation.published
    folder = published_folder(args.checkpoint, published, inputs.training)
    record = export_model(
        spec=inputs.spec,
        trained=Trained.of(
            inputs.training,
            folder=folder,
            published=published,
            model=inputs.model,
            rows=read_rows(args.rows / "held_out"),
        ),
        card=lambda *found: model_card(inputs, Exported(*found)),
        output=args.directory,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
