#!/usr/bin/env python3
"""Ask an expert the questions of held-out documents, before and after training."""

from functools import partial
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import Record, fill_record
from expertflow.data.records import ShardRecord
from expertflow.evaluate.records import GenerationRecord, GenerationSpec
from expertflow.hardware.card_locks import lock_cards
from expertflow.plan.records import TrainPlan
from expertflow.staging.ensure import open_staged
from expertflow.staging.records import StagingRecord
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import ModelRecord, TrainingRecord


class GenerationJob(Record, frozen=True, kw_only=True):
    spec: GenerationSpec
    shards: list[ShardRecord]
    plan: TrainPlan
    packing: PackingRecord
    model: ModelRecord
    training: TrainingRecord
    checkpoint: Path
    keep: Path
    rows: Path
    staging: StagingRecord


def main(job: GenerationJob) -> GenerationRecord:
    plan, model = job.plan, job.model
    if plan.gpu is not None:
        lock_cards(1)
    # They import torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from expertflow.evaluate.ask_models import GenerationInputs, ask_models
        from expertflow.train.model.load import load_for_scoring

    load = partial(load_for_scoring, model=model, plan=plan, fallbacks=job.training.fallbacks)
    # Weights are read several times, and the machine that trained has a local copy.
    with open_staged(job.staging, weights_sha256=model.weights_sha256, with_rows=False) as places:
        inputs = fill_record(
            GenerationInputs,
            job,
            tokenizer=Path(model.path),
            layout=model.tokenizer.layout,
            load=partial(load, weights=places.weights),
        )
        return ask_models(inputs)


if __name__ == "__main__":
    cli.run_stage(main, takes=GenerationJob)
