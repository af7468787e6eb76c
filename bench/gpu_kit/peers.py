"""Other trainers on the rows, weights and settings of ``lora``, in a separate process."""

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import step_work
from measured import Failed
from training_beside import run_program

from gpu_kit.training import MEASURED, WARM_UP, Variant, Work, plan_of, step_spread, utilization

# By part: the form of bench/peers/trl_steps.py, and the packages it needs.
PEERS = {
    "trl": ("eager", ("datasets", "trl")),
    "trl-compiled": ("compiled", ("datasets", "trl")),
    "unsloth": ("unsloth", ("datasets", "trl", "unsloth")),
}


def time_peer(work: Work, name: str) -> dict[str, Any]:
    """Time a peer's steps for as long as ours; a missing peer and out of memory are results."""
    form, needed = PEERS[name]
    if missing := [package for package in needed if find_spec(package) is None]:
        return {"absent": f"not installed: {', '.join(missing)}"}
    path, output = work.folder / "peer-case.json", work.folder / f"peer-{name}.json"
    if not path.is_file():
        path.write_text(json.dumps(peer_case(work)), encoding="utf-8")
    batch_size = json.loads(path.read_text(encoding="utf-8"))["batch_size"]
    places = ("--form", form, "--case", path, "--output", output)
    try:
        run_program(Path(sys.executable), "trl_steps.py", *places, device=work.device)
    except Failed as error:
        if "OutOfMemoryError" in str(error):
            return {"out_of_memory": str(error), "micro_batch_size": batch_size}
        sys.exit(str(error))
    found = json.loads(output.read_text(encoding="utf-8"))
    tokens_per_s, losses = found["n_tokens"] / found["timed_s"], found["losses"]
    return {
        "n_steps": len(found["steps_s"]),
        "tokens_per_s": tokens_per_s,
        **utilization(work, plan_of(work, Variant()), tokens_per_s),
        **step_spread(found["steps_s"]),
        "predicted": None,
        "first_step_s": found["first_step_s"],
        "data_wait_share": None,
        "peak_memory_bytes": found["peak_allocated_bytes"],
        "micro_batch_size": batch_size,
        "out_of_memory_at": [],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "loss_is_finite": all(map(math.isfinite, losses)),
        "words": found["words"],
    }


def peer_case(work: Work) -> dict[str, Any]:
    """Write the rows in our order, and the adapter that both start from; return a peer's case."""
    plan = plan_of(work, Variant())
    n_steps = work.packing.train.n_sequences // plan.global_batch_sequences
    job = {
        "micro_batch": plan.batch_size, "n_accumulation_steps": plan.gradient_accumulation_steps,
        "n_warmup_steps": 0, "n_timed_steps": n_steps, "fp32": False, "settings": {},
    }  # fmt: skip
    return {
        **step_work.case(work, "lora", job),
        "tokenizer": step_work.save_tokenizer(work.folder / "tokenizer"),
        "form": "padding_free", "device": work.device, "soak_s": work.soak_s,
        "measure_s": work.measure_s, "n_warmup_steps": WARM_UP, "n_timed_steps": MEASURED,
    }  # fmt: skip
