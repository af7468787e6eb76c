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
from expertflow.export.records import ExportRecord, ExportSpec
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.train.records import ModelRecord, TrainingRecord


def main(
    spec: ExportSpec,
    code: str,
    datasets: DatasetManifest,
    model: ModelRecord,
    plan: TrainPlan,
    training: TrainingRecord,
    monitor: MonitorRecord,
    evaluation: EvaluationRecord,
    checkpoint: Path,
    rows: Path,
    directory: Path,
) -> ExportRecord:
    inputs = CardInputs(
        spec=spec,
        datasets=datasets,
        model=model,
        plan=plan,
        training=training,
        monitor=monitor,
        evaluation=evaluation,
        code=code,
    )
    trained = Trained(
        folder=published_folder(checkpoint, evaluation.published, training),
        published=evaluation.published,
        base=Path(model.path),
        layout=model.tokenizer.layout,
        rows=read_rows(rows / "held_out"),
        method=training.method,
        precision=training.precision,
    )
    card = partial(model_card, inputs)
    return export_model(spec=spec, trained=trained, card=card, output=directory)


if __name__ == "__main__":
    hide_cards()
    cli.run_stage(main)
