#!/usr/bin/env python3
"""Write the published model: merged, checked, with tokenizer and model card."""

from functools import partial
from pathlib import Path

from expertflow.core import cli
from expertflow.export.card import CardInputs, model_card
from expertflow.export.merge import Trained, export_model
from expertflow.export.model_files import find_published_folder, hide_cards
from expertflow.export.records import ExportRecord
from expertflow.tokens.arrow import read_rows


class ExportInputs(CardInputs, frozen=True, kw_only=True):
    checkpoint: Path
    rows: Path
    directory: Path


def write_model(inputs: ExportInputs) -> ExportRecord:
    training, published = inputs.training, inputs.evaluation.published
    trained = Trained(
        folder=find_published_folder(inputs.checkpoint, published, training),
        published=published,
        base=Path(inputs.model.path),
        layout=inputs.model.tokenizer.layout,
        rows=read_rows(inputs.rows / "held_out"),
        method=training.method,
        precision=training.precision,
    )
    card = partial(model_card, inputs)
    return export_model(spec=inputs.spec, trained=trained, card=card, output=inputs.directory)


def main() -> None:
    hide_cards()
    cli.run_stage(write_model, takes=ExportInputs)


if __name__ == "__main__":
    main()
