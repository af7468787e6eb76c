"""Ours: time the steps of a plan with the product's own loop, in a separate process.

    python bench/peers/our_steps.py --case CASE.json --output RESULT.json

Works like an ablation or a tuning: ``run_trial`` assembles the run like ``train_expert`` and
drives its loop, without checkpoints, evaluation and monitor, which are also off for TRL.
"""

import argparse
import json
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))

import peft
import transformers
from transformers.models import qwen3

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.train.trial import Trial, run_trial

IMPORTED = (peft, qwen3)


def main() -> None:
    """Run one trial and write its measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    case = json.loads(args.case.read_text(encoding="utf-8"))
    folder = Path(case["folder"])
    asked = Trial(
        plan=read_record(TrainPlan, Path(case["plan"])), model=folder / "model.json",
        rows=folder / "packed", scratch=args.output.with_suffix(".scratch"),
        n_warmup_steps=case["n_warmup_steps"], n_timed_steps=case["n_timed_steps"],
    )  # fmt: skip
    took = run_trial(asked)
    if took.outcome != "measured":
        sys.exit(f"error: {took.outcome}: {took.problem}")
    said = {**msgspec.structs.asdict(took), "words": list(took.activated)}
    args.output.write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
