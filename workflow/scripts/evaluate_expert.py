#!/usr/bin/env python3
"""Score an expert before and after training, on held-out documents."""

from functools import partial
from pathlib import Path

from expertflow.core import cli
from expertflow.data.records import ShardRecord
from expertflow.evaluate.evaluation import EvalInputs, evaluate_expert
from expertflow.evaluate.records import EvaluationSpec
from expertflow.plan.records import TrainPlan
from expertflow.staging.ensure import staged
from expertflow.staging.records import StagingRecord
from expertflow.tokens.records import PackingRecord
from expertflow.train.model.load import load_for_scoring
from expertflow.train.records import ModelRecord, TrainingRecord

# Names of the rule's inputs that the evaluation takes.
NAMES = ("spec", "shards", "keep", "packing", "training", "rows", "checkpoint", "plan", "state")


def main() -> None:
    job = cli.stage(
        __doc__,
        EvaluationSpec,
        shards=[ShardRecord],
        plan=TrainPlan,
        packing=PackingRecord,
        model=ModelRecord,
        training=TrainingRecord,
        checkpoint="folder of the trained model",
        keep="keep-list",
        rows="folder of packed rows",
        staging=StagingRecord,
        state="folder of earlier evaluations",
        answers="answers.jsonl to write",
        output="evaluation.json to write",
    )
    model, plan = job.model, job.plan
    # Weights are read several times, and the machine that trained has a local copy.
    with staged(job.staging, weights_sha256=model.weights_sha256, with_rows=False) as places:
        inputs = EvalInputs(
            **job.pick(*NAMES),
            tokenizer=Path(model.path),
            layout=model.tokenizer.layout,
            load=partial(load_for_scoring, model=model, plan=plan, weights=places.weights),
            answers_path=job.answers,
        )
        evaluation = evaluate_expert(inputs)
    job.write(evaluation)


if __name__ == "__main__":
    cli.run(main)
