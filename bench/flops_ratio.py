"""Hold the formula for FLOPs against torch's counter, on the shapes of real models.

    python bench/flops_ratio.py [--models 0.6B 4B] [--rows 8] [--length 2048]

A step runs without data through the training's own loss, attention, adapters and checkpointing;
nothing is downloaded. Rows hold documents of several lengths, 30 % of tokens are targets. The ratio
is formula over counter; attention counts as causal and without the scores that a kernel computes
again. Prints a table; the last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

import torch
from memory_trace import ADAPTERS, facts_of, save_config

from expertflow.plan.flops import flops_per_token
from expertflow.train.trace.batch import sample_batch
from expertflow.train.trace.flops import count_step_flops
from expertflow.train.trace.model import TracedRun, as_on_card, build, materialise, read_config

SUPERVISED = 0.3


def documents(length: int) -> tuple[int, ...]:
    """Cut a row into documents of a half, a quarter, and so on."""
    parts = [length // 2, length // 4, length // 8]
    return (*parts, length - sum(parts))


def measure(config: Any, kind: str, *, rows: int, length: int, checkpoint: bool) -> dict[str, Any]:
    """Count one step and give formula over counter."""
    lora, begun = ADAPTERS[kind], time.perf_counter()
    run = TracedRun(
        config=config, method="full" if lora is None else "lora", lora=lora, attention="packed",
        dtype=torch.bfloat16, kernel=True, supervised_fraction=SUPERVISED,
    )  # fmt: skip
    lengths = documents(length)
    squares = sum(n * n for n in lengths)
    batch = sample_batch(lengths, rows, SUPERVISED)
    net = build(run, n_layers=config.num_hidden_layers, checkpoint=checkpoint)
    with as_on_card(run), torch.autocast("cpu", dtype=run.dtype):
        materialise(net, fake=True)
        counted = count_step_flops(net, batch, sum_len_sq=rows * squares) / batch.n_tokens
    ours = flops_per_token(
        facts_of(config),
        lora=lora,
        mean_context_tokens=squares / (2 * length),
        supervised_fraction=batch.n_target_tokens / batch.n_tokens,
        checkpoint_activations=checkpoint,
    )
    return {
        "kind": kind,
        "checkpoint_activations": checkpoint,
        "counted_flops_per_token": counted,
        "model_flops_per_token": ours.model,
        "hardware_flops_per_token": ours.hardware,
        "ratio": ours.hardware / counted,
        "wall_s": round(time.perf_counter() - begun, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["0.6B", "4B"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    results = []
    print("Qwen3  kind              checkpointed  GFLOP/token model  hardware  counted  ratio")
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            config = read_config(save_config(model, Path(folder)))
        for kind in ADAPTERS:
            for checkpoint in (False, True):
                size = {"rows": args.rows, "length": args.length}
                row = measure(config, kind, **size, checkpoint=checkpoint)
                results.append({"model": model, **row})
                print(
                    f"{model:5}  {kind:16}  {'yes' if checkpoint else 'no':>12}"
                    f"  {row['model_flops_per_token'] / 1e9:17.3f}"
                    f"  {row['hardware_flops_per_token'] / 1e9:8.3f}"
                    f"  {row['counted_flops_per_token'] / 1e9:7.3f}  {row['ratio']:.4f}",
                    flush=True,
                )
    print(json.dumps({"rows": args.rows, "length_tokens": args.length, "results": results}))


if __name__ == "__main__":
    main()
