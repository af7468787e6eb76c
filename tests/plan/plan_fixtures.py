"""Cards of the table, packed rows of Qwen3-0.6B, and plans for them."""

from typing import Any

import yaml
from msgspec.structs import replace
from support import LORA, ROOT, plan_spec

from expertflow.hardware.gpu_table import gpu_by_name
from expertflow.hardware.records import GpuFacts
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import ModelFacts, Reason, TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.tokens.records import LengthHistogram, LengthSuggestion, PackedSplit, PackingRecord

TABLE: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "config" / "hardware" / "gpus.yaml").read_text()
)["gpus"]
N_PARAMS = 596_049_920
QWEN_06B = ModelFacts(
    n_layers=28, hidden_size=1024, n_heads=16, n_kv_heads=8, head_dim=128, intermediate_size=3072,
    vocab_size=151936, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
SPLIT = PackedSplit(
    path="p", sha256="s", n_documents=20_000, n_tokens_in=10**7, n_tokens=10**7,
    n_tokens_dropped=0, n_target_tokens=3 * 10**6, n_padding_tokens=0, n_sequences=4883,
    sum_len_sq=512 * 10**7,
)  # fmt: skip
PACKING = PackingRecord(
    expert="e", packing="bfd", overflow="split", sequence_length_tokens=2048, length_reason="",
    seed=0, engines={}, engine_fallbacks=(), tokenizer_sha256="", n_special_text_documents=0,
    n_dropped_held_out=0, n_dropped_by_reason={}, samples=(), train=SPLIT, held_out=SPLIT,
    histogram=LengthHistogram(edges=(0, 1), counts=(1,), p50=1, p90=1, p99=1, max=1), choices=(),
    suggestion=LengthSuggestion(sequence_length_tokens=2048, reason=""),
)  # fmt: skip


def card(name: str) -> GpuFacts:
    facts = gpu_by_name(name, TABLE)
    assert facts is not None
    return facts


def seq(length: int) -> PackingRecord:
    return replace(PACKING, sequence_length_tokens=length)


def draft_of(gpu: GpuFacts | None, **changes: Any) -> PlanDraft:
    """Return a plan's draft; other arguments change the settings."""
    parts = {
        name: changes.pop(name)
        for name in ("packing", "facts", "trace", "n_params", "by_hand")
        if name in changes
    }
    made = {"packing": PACKING, "facts": QWEN_06B, "n_params": N_PARAMS, **parts}
    return PlanDraft(expert="e", spec=plan_spec(**changes), gpu=gpu, **made)


def plan(
    gpu: GpuFacts | None,
    packing: PackingRecord = PACKING,
    facts: ModelFacts = QWEN_06B,
    **more: Any,
) -> TrainPlan:
    """Plan with an adapter; ``more`` is a trace, a calibration, a tuning, or other settings."""
    measured = {name: more.pop(name, None) for name in ("calibration", "tuning")}
    free = {"method": "lora", "lora": LORA, "batch_size": None, "gradient_accumulation_steps": None}
    draft = draft_of(gpu, packing=packing, facts=facts, **{**free, **more})
    return plan_training(draft, **measured)


def reasons_of(made: TrainPlan) -> dict[str, Reason]:
    return {reason.setting: reason for reason in made.reasons}


def because_of(made: TrainPlan) -> dict[str, str]:
    return {reason.setting: reason.because for reason in made.reasons}
