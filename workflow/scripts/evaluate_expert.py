#!/usr/bin/env python3
"""Score an expert before and after training, on documents it never saw."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.documents import iter_kept
from expertflow.data.records import ShardRecord
from expertflow.evaluate.expert import evaluate_expert
from expertflow.evaluate.records import EvaluationSpec
from expertflow.plan.records import TrainPlan
from expertflow.train.load import load_for_scoring
from expertflow.train.records import ModelRecord


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json")
    parser.add_argument("--model", type=Path, required=True, help="model.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="trained model")
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="shard records")
    parser.add_argument("--keep", type=Path, required=True, help="keep-list")
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows")
    parser.add_argument("--output", type=Path, required=True, help="evaluation.json to write")
    args = parser.parse_args()
    plan = read_record(TrainPlan, args.plan)
    model = read_record(ModelRecord, args.model)
    shards = [read_record(ShardRecord, path) for path in args.shards]
    record = evaluate_expert(
        expert=plan.expert,
        spec=cli.spec_from_text(EvaluationSpec, args.spec),
        documents=list(iter_kept(shards, args.keep)),
        rows=args.rows,
        tokenizer=Path(model.path),
        layout=model.layout,
        load_before=lambda: load_for_scoring(None, model=model, plan=plan),
        load_after=lambda: load_for_scoring(args.checkpoint, model=model, plan=plan),
        micro_batch_size=plan.micro_batch_size,
    )
    write_record(args.output, record)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
