#!/usr/bin/env python3
"""Write the published model: merged, checked, with tokenizer and model card."""

from functools import partial
from pathlib import Path

from expertflow.core import cli
from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import EvaluationRecord
from expertflow.export.card import CardInputs, model_card
from expertflow.export.merge import Trained, export_model
from expertflow.export.model_files import hide_cards, published_folder
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
    job = cli.stage(
        __doc__,
        ExportSpec,
        **RECORDS,
        checkpoint="trained model",
        rows="folder of packed rows",
        directory="folder to write",
        output="export.json to write",
    )
    inputs = CardInputs(**job.pick("spec", "code", *RECORDS))
    published = inputs.evaluation.published
    record = export_model(
        spec=inputs.spec,
        trained=Trained(
            folder=published_folder(job.checkpoint, published, inputs.training),
            published=published,
            base=Path(inputs.model.path),
            layout=inputs.model.tokenizer.layout,
            rows=read_rows(job.rows / "held_out"),
            method=inputs.training.method,
            precision=inputs.training.precision,
        ),
        card=partial(model_card, inputs),
        output=job.directory,
    )
    job.write(record)


if __name__ == "__main__":
    cli.run(main)
