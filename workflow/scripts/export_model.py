#!/usr/bin/env python3
"""Write the published model: merged, checked, with tokenizer and model card."""

import os
from functools import partial
from pathlib import Path

from expertflow.core import cli
from expertflow.export.card import CardInputs, model_card
from expertflow.export.records import ExportRecord
from expertflow.tokens.arrow import read_rows


class ExportInputs(CardInputs, frozen=True, kw_only=True):
    checkpoint: Path
    rows: Path
    directory: Path


def main(inputs: ExportInputs) -> ExportRecord:
    # Hidden before CUDA starts, because peft would load adapters onto a busy card.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # They import torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from expertflow.export.merge import Trained, export_model

    training, published = inputs.training, inputs.evaluation.published
    trained = Trained(
        folder=inputs.checkpoint / published.path,
        published=published,
        base=Path(inputs.model.path),
        layout=inputs.model.tokenizer.layout,
        rows=read_rows(inputs.rows / "held_out"),
        method=training.method,
        precision=training.precision,
    )
    card = partial(model_card, inputs)
    return export_model(spec=inputs.spec, trained=trained, card=card, output=inputs.directory)


if __name__ == "__main__":
    cli.run_stage(main, takes=ExportInputs)
