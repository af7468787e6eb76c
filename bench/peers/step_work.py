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
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_kit.fixtures import SIZES, Size, make_model, make_rows, model_record
from gpu_kit.training import LORA, Session, Variant, Work, plan_of
from step_rows import rows_by_step, tokenizer

from expertflow.core.files import write_text
from expertflow.core.records import to_json, write_record
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.tokens.arrow import read_rows, write_rows
from expertflow.tokens.export_rows import export_rows
from expertflow.train.optimizers import learning_rate
from expertflow.train.processes import start_processes

# Enough documents that no step of a measurement is in a second epoch.
SMALL = ModelFacts(
    n_layers=4, hidden_size=256, n_heads=8, n_kv_heads=4, head_dim=32, intermediate_size=768,
    vocab_size=8192, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
SIZES |= {
    "tiny": msgspec.structs.replace(SIZES["tiny"], n_documents=6000),
    "small": Size(facts=SMALL, row_length=512, n_documents=2000),
}
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
    work = prepare_work(folder, job)
    write_record(folder / "model.json", model_record(folder / "model", work.model, work.sizes))
    saved = str(tokenizer(folder / "tokenizer"))
    cases = {method: {**case(work, method, job), "tokenizer": saved} for method in job["methods"]}
    split = read_rows(folder / "bfd" / "packed" / "train")
    said = {
        "n_parameters": work.sizes["n_parameters"],
        "row_length_tokens": split.length,
        "n_rows": len(split),
        "cases": cases,
    }
    write_text(folder / "work.json", json.dumps(said))


def prepare_work(folder: Path, job: dict[str, Any]) -> Work:
    model, device = job["model"], job["device"]
    sizes = make_model(folder / "model", model, device=device)
    packing = make_rows(folder / "bfd", model, packing="bfd")
    return Work(
        folder=folder, device=device, model=model, sizes=sizes, peak_tflops=None, soak_s=0.0,
        packings={"bfd": to_json(packing)}, measure_s=0.0, micro_batch=job["micro_batch"],
    )  # fmt: skip


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
    rows = read_rows(work.folder / "bfd" / "packed" / "train")
    if n_steps * plan.global_batch_sequences > len(rows):
        sys.exit(f"error: {n_steps} steps need more than the {len(rows)} rows; take fewer")
    write_record(work.folder / f"plan-{method}.json", plan)
    exported = work.folder / f"rows-{method}"
    arranged = exported.with_name(f"{exported.name}-packed")
    write_rows(arranged, rows_by_step(work.folder / "bfd" / "packed" / "train", plan, 0),
               length=rows.length)  # fmt: skip
    export_rows(arranged, exported, targets="labels", padded=False)
    return {
        **settings(plan),
        "plan": str(work.folder / f"plan-{method}.json"),
        "rows": str(exported),
        "model": str(work.folder / "model"),
        "adapter": str(adapter(work, variant, plan)) if plan.lora is not None else None,
        "rate": {learning_rate(step, plan) for step in range(n_steps)}.pop(),
    }


def settings(plan: TrainPlan) -> dict[str, Any]:
    """Return the settings that the peer must share with the plan."""
    names = (
        "method", "batch_size", "gradient_accumulation_steps", "precision", "optim", "weight_decay",
        "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "torch_compile",
        "gradient_checkpointing", "attention",
    )  # fmt: skip
    return {name: getattr(plan, name) for name in names}


def adapter(work: Work, variant: Variant, plan: TrainPlan) -> Path:
    """Save our run's initial adapter."""
    folder = work.folder / "adapter"
    session = Session(work, variant, plan, name="adapter", processes=start_processes(plan))
    try:
        session.run.net.save_pretrained(folder)
    finally:
        session.close()
    return folder


if __name__ == "__main__":
    # More threads do not help so small a model, and the machine may be shared.
    torch.set_num_threads(1)
    main()
