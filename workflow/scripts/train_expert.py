#!/usr/bin/env python3
"""Train an expert by its plan, resuming from its state if there is one.

By hand, with any hyper-parameter changed:
    train_expert.py --results results/expert-sql --output try/training.json --learning-rate 3e-6
"""

from expertflow.core import cli
from expertflow.core.records import fill_record, read_record
from expertflow.core.settings import name_of
from expertflow.core.sidecars import write_sidecar
from expertflow.hardware.card_locks import lock_cards
from expertflow.plan.records import TrainPlan
from expertflow.train.flags import changes_of, parse_args, trainer_parser


def main() -> None:
    args = parse_args(trainer_parser(__doc__))
    changes, plan = changes_of(args), read_record(TrainPlan, args.plan)
    if plan.gpu is not None:
        lock_cards(changes.get(name_of(TrainPlan.world_size), plan.world_size))
    # They import torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from expertflow.train.feed.on_the_fly import Documents
        from expertflow.train.job import TrainingJob, run_job

    documents = args.keep and Documents(shards=tuple(args.shards), keep=args.keep)
    job = fill_record(TrainingJob, args, changes=changes, documents=documents)
    if run_job(job):
        write_sidecar(args.output, spec=args.spec, code=args.code, files=args.files)


if __name__ == "__main__":
    cli.run(main, interrupted="run again to resume")
