"""Compare the plan's model of a step with published training speeds.

    python bench/step_model.py

Rows of bench/published_speeds.csv are trainings on listed cards in bf16, by others; none was
measured here. A family's share of the peak is fitted to the one or two rows marked for it and
printed next to that in plan/step_time.py; errors are over the other rows. Rows with ``unsure`` do
not fully specify the step, and are listed with their errors but counted separately. Several cards
are assumed to share the work perfectly. The last line is JSON.
"""

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.hardware.gpu_table import gpu_by_name
from expertflow.plan import step_time
from expertflow.plan.flops import count_trained_weights, layer_shapes
from expertflow.plan.records import ModelFacts
from expertflow.plan.settings import LoraSpec
from expertflow.plan.step_time import (
    CardSpeed,
    LayerCount,
    StepWork,
    card_speed,
    predict_step,
)

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "bench" / "published_speeds.csv"
CARDS = yaml.safe_load((ROOT / "config" / "hardware" / "gpus.yaml").read_text())["gpus"]
# Layers, hidden size, heads, heads of keys, size of a head, inner size, vocabulary, tied head.
SHAPES = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864, 151_936, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 128, 8960, 151_936, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 128, 11_008, 151_936, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18_944, 152_064, False),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 14_336, 128_256, False),
    "Llama-3.2-3B": (28, 3072, 24, 8, 128, 8192, 128_256, True),
    "Qwen-7B": (32, 4096, 32, 32, 128, 11_008, 151_936, False),
    "Qwen-1.8B": (24, 2048, 16, 16, 128, 5504, 151_936, False),
    "TinyLlama-1.1B": (22, 2048, 32, 4, 64, 5632, 32_000, False),
    "MPT-1B": (24, 2048, 16, 16, 128, 8192, 50_368, True),
    "MPT-3B": (32, 2560, 20, 20, 128, 10_240, 50_368, True),
    "MPT-7B": (32, 4096, 32, 32, 128, 16_384, 50_368, True),
    "MPT-13B": (40, 5120, 40, 40, 128, 20_480, 50_368, True),
}
# Their uncompiled kernels: bytes and launches of transformers' own layers with bf16
# weights, counted like ours; MPT's have no gate, no rotation and plain norms.
EAGER = {"full": LayerCount(43, 145), "lora": LayerCount(90, 250), "mpt": LayerCount(15, 80)}
# Logits in fp32, in several passes, if the loss is not fused.
PLAIN_LOSS_BYTES = 24
Row = dict[str, str]


def facts_of(model: str) -> ModelFacts:
    layers, hidden, heads, kv, dim, inner, vocab, tied = SHAPES[model]
    is_plain = model.startswith("MPT")
    return ModelFacts(
        n_layers=layers, hidden_size=hidden, n_heads=heads, n_kv_heads=kv, head_dim=dim,
        intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied,
        model_type="starcoder2" if is_plain else "llama",
    )  # fmt: skip


def work_of(row: Row) -> StepWork:
    facts, lora = facts_of(row["model"]), None
    kernels = "mpt" if row["model"].startswith("MPT") else row["method"].removeprefix("q")
    if row["method"] != "full":
        targets = tuple(layer_shapes(facts))
        lora = LoraSpec(r=int(row["rank"]), dropout=0.0, targets=targets)
    return StepWork(
        facts=facts,
        lora=lora,
        n_tokens=int(row["length"]) * int(row["rows"]),
        n_micro_batches=int(row["micro_batches"]),
        mean_context_tokens=int(row["length"]) / 2,
        supervised_fraction=1.0,
        checkpoint=row["checkpoint"] == "yes",
        compiled=row["kernels"] == "fused",
        is_quantized=row["method"] == "qlora",
        n_trained=count_trained_weights(facts, lora),
        weight_bytes=int(row["weight_bytes"]),
        state_bytes=int(row["state_bytes"]),
        n_shares=int(row["cards"]) if lora is None else 1,
        loss_bytes=step_time.LOSS_BYTES if row["loss"] == "fused" else PLAIN_LOSS_BYTES,
        layers=None if row["kernels"] == "fused" else EAGER[kernels],
    )


def speed_of(row: Row, share: float | None = None) -> CardSpeed:
    gpu = gpu_by_name(row["card"], CARDS)
    speed = card_speed(gpu, "bf16", use_tf32=True)
    assert gpu is not None and isinstance(speed, CardSpeed), speed
    if share is None:
        return speed
    return speed._replace(flops_per_s=share * (gpu.peak_bf16_flops_per_s or 0))


def published_s(row: Row) -> float:
    work = work_of(row)
    return work.n_tokens * work.n_micro_batches / float(row["tokens_per_s"])


def fit_share(row: Row) -> float:
    """Return the share of the peak at which a row takes its published time."""
    low, high = 0.05, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        slow = predict_step(work_of(row), speed_of(row, middle)).total_s > published_s(row)
        low, high = (middle, high) if slow else (low, middle)
    return low


def compare(row: Row) -> dict[str, Any]:
    step = predict_step(work_of(row), speed_of(row))
    return {
        "row": int(row["row"]),
        "error": step.total_s / published_s(row) - 1,
        "bound": step_time.bound_of(step),
        "fitted": bool(row["fitted"]),
        "unsure": row["unsure"] or None,
    }


def summarize(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median and worst error, and the 10th and 90th percentile of real over predicted."""
    sizes = sorted(abs(one["error"]) for one in found)
    ratios = statistics.quantiles([1 / (1 + one["error"]) for one in found], n=10)
    return {
        "rows": len(found),
        "median_error": statistics.median(sizes),
        "worst_error": sizes[-1],
        "above_35_percent": [one["row"] for one in found if abs(one["error"]) > 0.35],
        "band": [ratios[0], ratios[-1]],
    }


def main() -> None:
    rows = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
    found = []
    for row in rows:
        one = compare(row)
        found.append(one)
        what = f"{row['model']} {row['method']}, {row['cards']} x {row['card']}"
        size = f"{row['length']} x {row['rows']}"
        note = one["unsure"] or ("fitted" if one["fitted"] else "")
        print(f"{one['row']:3} {what:38} {size:10} {one['bound']:10} {one['error']:+5.0%}  {note}")
    shares = {r["row"]: round(fit_share(r), 3) for r in rows if r["fitted"]}
    in_use = {name: share for name, (share, fitted) in step_time.PRODUCT_SHARE.items() if fitted}
    print(f"shares that fit: {shares}; in use: {in_use}")
    sure = [one for one in found if not one["fitted"] and not one["unsure"]]
    unsure = [one for one in found if one["unsure"]]
    result = {"sure": summarize(sure), "unsure": summarize(unsure), "shares": shares}
    for name in ("sure", "unsure"):
        part = result[name]
        print(
            f"{name}: {part['rows']} rows, median error {part['median_error']:.1%}, worst"
            f" {part['worst_error']:.0%}, real over predicted {part['band'][0]:.2f} to"
            f" {part['band'][1]:.2f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
