"""Write the inputs of both trainers: model, rows in step order, plans, adapters.

    python bench/peers/step_work.py --job JOB.json

Runs in our environment, outside the measurement. Random weights of a known shape learn random
ids in documents of realistic lengths (those of bench/gpu_kit); the plan is made like the
product's, with fixed micro-batch and accumulation. The rows of the plan's steps are exported
in their order, without padding; a LoRA run of the peer starts from our adapter.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu_kit.fixtures import make_model, make_rows, model_record
from gpu_kit.training import LORA, Variant, Work, open_session, plan_of

from expertflow.core.files import write_text
from expertflow.core.records import write_record
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows, read_rows, write_rows
from expertflow.tokens.export_rows import export_rows
from expertflow.train.feed.loader import make_feed
from expertflow.train.optimizers import learning_rate

# A rate at which the losses move, so that a different optimizer would be noticed; no
# dropout, whose masks differ.
SETTINGS = {
    "full": {"learning_rate": 3e-4},
    "lora": {"learning_rate": 3e-3, "lora": msgspec.structs.replace(LORA, dropout=0.0)},
}


def main() -> None:
    """Write the work of every method, and print where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", type=Path, required=True, help="JSON; see training_beside.py")
    job = json.loads(parser.parse_args().job.read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    model, device = job["model"], job["device"]
    sizes = make_model(folder / "model", model, device=device)
    work = Work(
        folder=folder, device=device, model=model, sizes=sizes, packing=make_rows(folder, model),
        soak_s=0.0, measure_s=0.0, micro_batch=job["micro_batch"],
    )  # fmt: skip
    write_record(folder / "model.json", model_record(folder / "model", model, sizes))
    saved = save_tokenizer(folder / "tokenizer")
    cases = {method: {**case(work, method, job), "tokenizer": saved} for method in job["methods"]}
    split = read_rows(folder / "packed" / "train")
    said = {
        "n_parameters": sizes["n_parameters"],
        "row_length_tokens": split.length,
        "n_rows": len(split),
        "cases": cases,
    }
    write_text(folder / "work.json", json.dumps(said))


def case(work: Work, method: str, job: dict[str, Any]) -> dict[str, Any]:
    """Plan a method's run, export its rows, save its adapter; return the case for both sides."""
    n_steps = job["n_warmup_steps"] + job["n_timed_steps"]
    # Allows a narrow bound on losses; both sides save memory.
    fp32 = {"bf16": False, "fp16": False, "use_tf32": False, "gradient_checkpointing": True}
    variant = Variant(
        method=method, micro_batch=job["micro_batch"], changes=fp32 if job["fp32"] else {}
    )
    plan = plan_of(
        work, variant, gradient_accumulation_steps=job["n_accumulation_steps"], max_steps=n_steps,
        warmup_ratio=0.0, lr_scheduler_type="constant_with_warmup",
        **job.get("settings", SETTINGS[method]),
    )  # fmt: skip
    rows = read_rows(work.folder / "packed" / "train")
    if n_steps * plan.global_batch_sequences > len(rows):
        sys.exit(f"error: {n_steps} steps need more than the {len(rows)} rows; take fewer")
    written = work.folder / f"plan-{method}.json"
    write_record(written, plan)
    arranged, exported = work.folder / f"arranged-{method}", work.folder / f"rows-{method}"
    write_rows(arranged, rows_by_step(rows, plan), length=rows.length)
    export_rows(arranged, exported, targets="labels")
    adapter = None
    if plan.lora is not None:
        adapter = str(work.folder / "adapter")
        with open_session(work, plan, name="adapter") as session:
            session.run.net.save_pretrained(adapter)
    # The settings that the peer must share with the plan.
    names = (
        "method", "batch_size", "gradient_accumulation_steps", "precision", "optim", "weight_decay",
        "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "torch_compile",
        "gradient_checkpointing", "attention",
    )  # fmt: skip
    return {
        **{name: getattr(plan, name) for name in names},
        "plan": str(written),
        "rows": str(exported),
        "model": str(work.folder / "model"),
        "adapter": adapter,
        "rate": {learning_rate(step, plan) for step in range(n_steps)}.pop(),
    }


def rows_by_step(rows: PackedRows, plan: TrainPlan) -> Iterator[PackedRows]:
    """Return the rows of every step in our order, so that another trainer sees the same."""
    order = make_feed(plan, rows).order
    for step in range(plan.n_steps):
        chosen = order.rows_of_step(step)
        n_short = plan.global_batch_sequences - len(chosen)
        # A row without targets adds nothing to loss, gradient or the count of targets.
        ids = np.concatenate([rows.take_ids(chosen), np.zeros((n_short, rows.length), np.int32)])
        lengths = rows.seq_lengths.take(chosen).tolist() + [[rows.length]] * n_short
        spans = rows.spans.take(chosen).tolist() + [[]] * n_short
        yield PackedRows.from_lists(ids, lengths, spans)


def save_tokenizer(folder: Path) -> str:
    """Save a tokenizer that has only special tokens; TRL needs one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    made.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    # More threads do not help so small a model, and the machine may be shared.
    torch.set_num_threads(1)
    main()
