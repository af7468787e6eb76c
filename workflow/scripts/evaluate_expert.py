#!/usr/bin/env python3
"""Score an expert before and after training, on documents it never saw."""

from functools import partial
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.records import ShardRecord
from expertflow.evaluate.expert import Case, evaluate_expert
from expertflow.evaluate.records import EvaluationSpec
from expertflow.plan.records import TrainPlan
from expertflow.staging.ensure import staged
from expertflow.staging.records import StagingRecord
from expertflow.tokens.records import PackingRecord
from expertflow.train.model.load import load_for_scoring
from expertflow.train.records import ModelRecord, TrainingRecord

# Records, and places to read from or to write to, by the names of the rule.
PATHS = ("plan", "packing", "model", "training", "checkpoint", "keep", "rows", "staging")
PATHS += ("state", "answers", "output")


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="shard records")
    for name in PATHS:
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    plan = read_record(TrainPlan, args.plan)
    model = read_record(ModelRecord, args.model)
    # Weights are read several times, and on the machine that trained a copy is at hand.
    staging = read_record(StagingRecord, args.staging)
    with staged(staging, weights_sha256=model.weights_sha256, with_rows=False) as places:
        case = Case(
            spec=cli.spec_from_text(EvaluationSpec, args.spec),
            shards=[read_record(ShardRecord, path) for path in args.shards],
            keep=args.keep,
            packing=read_record(PackingRecord, args.packing),
            training=read_record(TrainingRecord, args.training),
            rows=args.rows,
            tokenizer=Path(model.path),
            layout=model.layout,
            checkpoint=args.checkpoint,
            load=partial(load_for_scoring, model=model, plan=plan, weights=places.weights),
            plan=plan,
            state=args.state,
            answers_path=args.answers,
        )
        evaluation = evaluate_expert(case)
    write_record(args.output, evaluation)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
