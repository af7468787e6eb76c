"""Ours: time the steps of a plan with the product's own loop, in a separate process.

    python bench/peers/our_steps.py --case CASE.json --output RESULT.json

Works like an ablation or a tuning: ``run_trial`` assembles the run like ``train_expert`` and
drives its loop, without checkpoints, evaluation and monitor, which are also off for TRL.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import peft
import transformers
from memory_now import peak_resident_bytes
from transformers.models import qwen3

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.train import loop
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
    trial = Trial(
        plan=read_record(TrainPlan, Path(case["plan"])), model=folder / "model.json",
        rows=folder / "bfd" / "packed", scratch=args.output.with_suffix(".scratch"),
        n_warmup_steps=case["n_warmup_steps"], n_timed_steps=case["n_timed_steps"],
    )  # fmt: skip
    loop.train_step, began_cpu_s, ended_cpu_s = record_cpu_times(loop.train_step)
    took = run_trial(trial)
    if took.outcome != "measured":
        sys.exit(f"error: {took.outcome}: {took.problem}")
    said = {
        **msgspec.structs.asdict(took),
        # Between the untimed steps and these, the card is synchronized, and layers are compiled.
        "cpu_s": ended_cpu_s[-1] - began_cpu_s[case["n_warmup_steps"]],
        "peak_host_rss_bytes": peak_resident_bytes(),
        "words": list(took.activated),
    }
    args.output.write_text(json.dumps(said), encoding="utf-8")


def record_cpu_times(
    step: Callable[..., Any],
) -> tuple[Callable[..., Any], list[float], list[float]]:
    """Record this process's CPU time, all threads together, as each step begins and ends."""
    began: list[float] = []
    ended: list[float] = []

    def record_step(*args: Any) -> Any:
        began.append(time.process_time())
        done = step(*args)
        ended.append(time.process_time())
        return done

    return record_step, began, ended


if __name__ == "__main__":
    main()
