"""Trace the memory of training steps without a card: bytes, and the time of the trace.

    python bench/memory_trace.py [--models 0.6B 1.7B 4B 8B] [--rows 16] [--length 2048] [--measure]

Shapes are those of Qwen3; nothing is downloaded. With ``--measure`` a small model takes a real step
on the CPU in fp32, and the growth of resident memory is printed next to the traced bytes.
Prints tables; the last line is JSON.
"""

import argparse
import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in ("workflow/scripts", "bench", "tests")
)

import torch
from gpu_kit.fixtures import SIZES, make_size, model_config
from msgspec.structs import replace

from expertflow.core.process import peak_resident_bytes
from expertflow.plan.settings import LoraSpec
from expertflow.train.memory_trace import (
    TracedRun,
    build_model,
    follow_step,
    materialize_weights,
    whole_model,
)

GIB, MIB = 1 << 30, 1 << 20
MODELS = ("0.6B", "1.7B", "4B", "8B")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


LORA = LoraSpec(r=16, alpha=32, dropout=0.0, targets=TARGETS, use_dora=False, use_rslora=False)
DROPOUT, DORA = replace(LORA, dropout=0.05), replace(LORA, use_dora=True)
# By name of a method: its adapter.
METHODS = {
    "full": None,
    "full, pure_bf16": None,
    "lora": LORA,
    "lora, dropout": DROPOUT,
    "dora": DORA,
    "dora, dropout": replace(DORA, dropout=0.05),
    "qlora": DROPOUT,
}


def run_of(config: Any, kind: str) -> TracedRun:
    """Describe a run; ``kind`` is a key of ``METHODS``."""
    lora = METHODS[kind]
    method = kind if kind == "qlora" else "full" if lora is None else "lora"
    trained_dtype = torch.bfloat16 if kind == "full, pure_bf16" else torch.float32
    return TracedRun(
        config=config, method=method, lora=lora, attention="packed", dtype=torch.bfloat16,
        kernel=True, supervised_fraction=0.3, trained_dtype=trained_dtype,
    )  # fmt: skip


def trace_steps(config: Any, kind: str, n_rows: int, length: int) -> dict[str, Any]:
    """Trace a step with and without checkpointing."""
    row: dict[str, Any] = {"kind": kind}
    run = run_of(config, kind)
    for name, checkpoint in (("kept", False), ("checkpointed", True)):
        begun = time.perf_counter()
        model, gradients, step = whole_model(run, n_rows, length, checkpoint=checkpoint)
        row[f"{name}_s"] = round(time.perf_counter() - begun, 2)
        row |= {"model_bytes": model, "gradient_bytes": gradients, f"{name}_step_bytes": step}
    return row


def measure_step(n_rows: int, length: int) -> dict[str, int]:
    """Take a real step of a small model and compare resident memory with the traced bytes."""
    config = model_config(make_size(512, 1536, 6, 8, n_kv=4, d=64, vocab=32_000).facts)
    run = TracedRun(
        config=config, method="full", lora=None, attention="eager", dtype=torch.float32,
        kernel=True, supervised_fraction=0.3,
    )  # fmt: skip
    warm = build_model(run, n_layers=1, checkpoint=False)
    materialize_weights(warm)
    follow_step(warm, run, 1, 64)
    del warm
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    net = build_model(run, n_layers=6, checkpoint=False)
    materialize_weights(net)
    model, gradients, phases = follow_step(net, run, n_rows, length)
    grown = peak_resident_bytes() - before
    return {"traced_bytes": model + gradients + max(phases.values()), "grown_bytes": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    results: list[dict[str, Any]] = []
    print("Qwen3  kind            model  gradients  step GiB: kept  checkpointed")
    for model in args.models:
        config = model_config(SIZES[model].facts)
        for kind in METHODS:
            row = trace_steps(config, kind, args.rows, args.length)
            results.append({"model": model, **row})
            print(
                f"{model:5}  {kind:14}  {row['model_bytes'] / GIB:5.2f}"
                f"  {row['gradient_bytes'] / GIB:9.2f}  {row['kept_step_bytes'] / GIB:14.2f}"
                f"  {row['checkpointed_step_bytes'] / GIB:12.2f}"
                f"   ({row['kept_s'] + row['checkpointed_s']:.1f} s)",
                flush=True,
            )
    out: dict[str, Any] = {"rows": args.rows, "length_tokens": args.length, "results": results}
    if args.measure:
        out["real_step"] = seen = measure_step(4, 512)
        print(
            f"a real step on the CPU: {seen['traced_bytes'] / MIB:.0f} MiB traced,"
            f" {seen['grown_bytes'] / MIB:.0f} MiB more resident"
        )
    print(json.dumps(out))


if __name__ == "__main__":
    main()
