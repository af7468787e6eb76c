"""Train the same rows with our trainer and with TRL's SFTTrainer; compare loss step by step.

    python bench/train_parity.py --environments DIR    # as for bench/peers/environments.py

A tiny random Qwen3 in float32 on the CPU learns documents of a noisy Markov chain, so that the loss
falls and a relative bar means something. Ours is trained by workflow/scripts/train_expert.py from a
plan; TRL gets the rows that our order takes at every step, one after another, from
workflow/scripts/export_rows.py, and reads them in that order, padding-free. Where an epoch's last
step is smaller, it is filled with rows without targets. Same weights, micro-batches, accumulation,
clipping, AdamW, rates; no dropout. With LoRA, TRL starts from our adapter as it was before the
first step. The bar is 1 % of TRL's loss at every one of the steps. Gradient norms before clipping
are compared as well, and held to no bar.

Where the two differ by design, in the versions pinned:
- the mean under accumulation is the same: both divide by the targets of the whole step (ours
  counts them before the step, transformers by ``num_items_in_batch``);
- rates: ours are peak * (step + 1) / warm-up from step 0 on, transformers' peak * step / warm-up,
  so its first step changes nothing and its warm-up is one step behind; afterwards the cosine is the
  same. TRL is given our rates, but in the cases "its own rates", which tell what this is worth and
  are held to no bar;
- epsilon of AdamW is 1e-8 in both;
- weight decay leaves out one-dimensional weights in ours, biases and norms in transformers: the
  same parameters in Qwen3.

The last two cases are wrong on purpose, to show that the comparison notices.

Prints a table; the last line is JSON. Ends with 1 where a case is not as it has to be.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import environment, versions
from parity_runs import LENGTH, MAX_NORM, N_STEPS, OURS, SCRIPTS, run, train_ours
from step_rows import rows_by_step, tokenizer

from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import write_rows

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison. What TRL does otherwise than ours is in ``change``.

    Where ``agrees`` is null, the difference is told and held to no bar.
    """

    name: str
    ours: str
    change: str | None = None
    agrees: bool | None = True


CASES = (
    *(Case(name=name, ours=name) for name in OURS),
    Case(name="its own rates", ours="full", change="rates", agrees=None),
    Case(name="its own rates, low", ours="full, low rate", change="rates", agrees=None),
    Case(name="no decay in TRL", ours="full, decay", change="decay", agrees=False),
    Case(name="rows in another order", ours="full, decay", change="order", agrees=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--environments", type=Path, required=True, help="virtual environments")
    args = parser.parse_args()
    built = environment("trl_peft", args.environments)
    if built.problem:
        sys.exit(f"error: TRL cannot be installed: {built.problem}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = {run: train_ours(folder / str(i), run) for i, run in enumerate(OURS)}
        cases = [peer_case(folder, case, ours[case.ours]) for case in CASES]
        (folder / "cases.json").write_text(json.dumps(cases))
        program = ROOT / "bench" / "peers" / "trl_train.py"
        places = ["--cases", str(folder / "cases.json"), "--output", str(folder / "logs.json")]
        run([str(built.python), str(program), *places])
        logs = json.loads((folder / "logs.json").read_text())
    results = [
        compared(case, ours[case.ours]["steps"], log) for case, log in zip(CASES, logs, strict=True)
    ]
    report(results, versions(built))


def peer_case(folder: Path, case: Case, ours: dict[str, Any]) -> dict[str, Any]:
    """Write what TRL needs for a case; give it as JSON."""
    plan: TrainPlan = ours["plan"]
    base = ours["folder"] / "base_model"
    rows = ours["folder"] / ("shifted" if case.change == "order" else "arranged")
    if not rows.exists():
        export(ours["folder"], plan, rows, shift=int(case.change == "order"))
    settings = {
        "max_steps": plan.n_steps,
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.n_accumulation_steps,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": plan.lr_scheduler_type,
        "warmup_steps": plan.n_warmup_steps,
        "weight_decay": 0.0 if case.change == "decay" else plan.weight_decay,
        "max_grad_norm": plan.max_grad_norm,
        "adam_beta1": plan.adam_beta1,
        "adam_beta2": plan.adam_beta2,
        "adam_epsilon": plan.adam_epsilon,
        "optim": plan.optim,
        "seed": plan.seed,
    }
    rates = [step["learning_rate"] for step in ours["steps"]]
    return {
        "settings": settings,
        "model": str(base),
        "tokenizer": str(tokenizer(folder / "tokenizer")),
        "adapter": ours["adapter"] and str(ours["adapter"]),
        "rows": str(rows),
        "rates": None if case.change == "rates" else rates,
    }


def export(folder: Path, plan: TrainPlan, output: Path, *, shift: int) -> None:
    """Export the rows of all steps, one step after another, as TRL has to see them."""
    arranged = output.with_name(f"{output.name}-packed")
    write_rows(arranged, rows_by_step(folder / "packed" / "train", plan, shift), length=LENGTH)
    script = [sys.executable, str(SCRIPTS / "export_rows.py"), "--rows", str(arranged)]
    run([*script, "--output", str(output)])


def compared(
    case: Case, steps: list[dict[str, Any]], log: list[dict[str, float]]
) -> dict[str, Any]:
    """Compare two runs step by step; differences are relative to TRL's figure."""
    n = min(len(steps), len(log))
    apart = {}
    for name in ("loss", "grad_norm", "learning_rate"):
        ours, theirs = (np.array([step[name] for step in run]) for run in (steps[:n], log[:n]))
        apart[name] = np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-12)
    largest = float(apart["loss"].max())
    return {
        "case": case.name,
        "change": case.change,
        "agrees": case.agrees,
        "as_expected": case.agrees in (None, largest <= BAR) and len(steps) == len(log) == N_STEPS,
        "first": {"ours": steps[0]["loss"], "trl": log[0]["loss"]},
        "last": {"ours": steps[-1]["loss"], "trl": log[-1]["loss"]},
        "largest": largest,
        "at_step": int(apart["loss"].argmax()) + 1,
        "mean": float(apart["loss"].mean()),
        "grad_norm_largest": float(apart["grad_norm"].max()),
        "rate_largest_after_warmup": float(apart["learning_rate"][N_STEPS // 5 :].max()),
        "n_clipped": sum(step["grad_norm"] > MAX_NORM for step in steps),
    }


def report(results: list[dict[str, Any]], packages: dict[str, str]) -> None:
    """Print the table and the JSON line; fail where a case is not as it has to be."""
    print(
        f"{'case':>22} {'first':>8} {'ours':>8} {'TRL':>8} {'largest':>9} {'at step':>8}"
        f" {'mean':>9} {'norm':>9} {'clipped':>8}  as expected"
    )
    for r in results:
        print(
            f"{r['case']:>22} {r['first']['ours']:8.4f} {r['last']['ours']:8.4f}"
            f" {r['last']['trl']:8.4f} {r['largest']:9.1e} {r['at_step']:8d} {r['mean']:9.1e}"
            f" {r['grad_norm_largest']:9.1e} {r['n_clipped']:8d}"
            f"  {'told' if r['agrees'] is None else 'yes' if r['as_expected'] else 'NO'}"
        )
    print(f"bar: {BAR:.0%} of TRL's loss at each of {N_STEPS} steps")
    print(json.dumps({"bar": BAR, "packages": packages, "cases": results}))
    sys.exit(not all(r["as_expected"] for r in results))


if __name__ == "__main__":
    main()
