"""The prediction of peak memory, and the micro-batch chosen by it."""

import math
from typing import Any

import pytest
from msgspec.structs import replace
from plan_fixtures import N_PARAMS, QWEN_06B, card, draft_of, plan, seq
from support import LORA, plan_spec

from expertflow.core.errors import HardwareError
from expertflow.plan import memory
from expertflow.plan.draft import PlanDraft
from expertflow.plan.flops import adapter_weights, count_weights
from expertflow.plan.memory import BUSY_TOKENS, choose_micro_batch
from expertflow.plan.records import (
    MemoryLine,
    MemoryParts,
    MemoryTrace,
    ModelFacts,
)

H100 = card("H100 SXM")


def peak_of(n_tokens: int = 512, **changes: Any) -> int:
    peak = memory.peak_bytes(draft_of(H100, packing=seq(n_tokens), **changes), 1, checkpoint=False)
    assert peak is not None
    return peak


def bytes_per_parameter(less: int, more: int) -> float:
    return (more - less) / (1 + memory.RESERVE_FRACTION) / N_PARAMS


def test_moments_in_8_bits_take_a_quarter_and_those_of_bf16_weights_a_half() -> None:
    less = bytes_per_parameter(peak_of(optim="adamw_8bit"), peak_of())
    assert math.isclose(less, 6, abs_tol=1e-6)
    both = (plan_spec(pure_bf16=True, optim=optim) for optim in ("adamw_8bit", "adamw_torch"))
    per_weight = (memory.standing_bytes(spec, QWEN_06B)[0] / N_PARAMS for spec in both)
    assert [round(n, 2) for n in per_weight] == [6, 8]


def test_sharding_divides_the_model_and_not_the_activations() -> None:
    for n_tokens in (64, 512):
        shared = peak_of(n_tokens, parallel="fsdp", world_size=4)
        less = bytes_per_parameter(shared, peak_of(n_tokens))
        assert math.isclose(less, 16 * 3 / 4, abs_tol=1e-6)


def test_the_full_model_is_the_peak_if_a_shard_of_everything_is_less() -> None:
    """A card loads the model before it is sharded."""
    settings = {"method": "lora", "lora": LORA, "parallel": "fsdp"}
    draft = draft_of(H100, packing=seq(64), **settings, world_size=8)
    made = memory.predict_memory(draft, 1, checkpoint=True)
    assert made is not None
    whole = 2 * N_PARAMS + 4 * draft.n_trainable
    assert (made.model_bytes, made.optimizer_bytes, made.step_bytes) == (whole, 0, 0)
    spec = plan_spec(parallel="fsdp", world_size=64)
    n_bytes, what = memory.standing_bytes(spec, QWEN_06B)
    assert n_bytes == 4 * count_weights(QWEN_06B) and "loads first" in what


LINE = MemoryLine(
    checkpoint_activations=False, model_bytes=4000, gradient_bytes=400, n_tokens=(100, 400, 1600),
    step_bytes=(1000, 1000, 13_000),
)  # fmt: skip
TRACE = MemoryTrace(lines=(LINE,))


# Adapters of 0.6B's q_proj and v_proj: 28 layers of rank 4.
N_TRAINED = 28 * 4 * (1024 + 2048 + 1024 + 1024)


def parts(n_tokens: int = 400, trace: MemoryTrace | None = TRACE, **changes: Any) -> MemoryParts:
    settings = {"method": "lora", "lora": LORA, **changes}
    draft = draft_of(H100, packing=seq(n_tokens), trace=trace, **settings)
    made = memory.predict_memory(draft, 1, checkpoint=False)
    assert made is not None
    return made


def test_the_parts_of_a_traced_step_add_up() -> None:
    made = parts()
    optimizer = 400 + 8 * N_TRAINED
    assert (made.model_bytes, made.optimizer_bytes, made.step_bytes) == (4000, optimizer, 1000)
    reserve = memory.RESERVE_BYTES + int(memory.RESERVE_FRACTION * (5000 + optimizer))
    assert made.reserve_bytes == reserve
    assert made.total_bytes == 5000 + optimizer + made.reserve_bytes
    # A trace holds for half precision of either kind.
    assert parts(bf16=False, fp16=True) == made and parts(bf16=False).step_bytes != made.step_bytes


def test_traced_points_are_interpolated_linearly() -> None:
    expected = {100: 1000, 250: 1000, 700: 4000, 1600: 13_000, 3200: 29_000}
    assert {n: parts(n_tokens=n).step_bytes for n in expected} == expected


def test_only_linear_layers_are_in_4_bits() -> None:
    """The embedding of 0.6B, 155.6 M weights of 596 M, stays in 16 bits."""
    made = parts(trace=None, method="qlora")
    n_linear = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    held = 0.52 * n_linear + 2 * (N_PARAMS - n_linear)
    assert made.model_bytes == int(held + 4 * N_TRAINED)


FULL, ADAPTER, DORA = memory.FULL, memory.ADAPTER, memory.DORA
# Whether layers are checkpointed; bytes per token and unit of width; copies; rows of the loss.
PRIORS: list[tuple[dict[str, Any], bool, int, int, float]] = [
    ({"lora": None}, False, 28 * FULL.kept, 2 * N_PARAMS, 0.3 * 2048),
    ({"lora": None}, True, 28 * FULL.checkpointed + FULL.at_peak, 2 * N_PARAMS, 0.3 * 2048),
    ({"lora": None, "bf16": False}, False, 2 * 28 * FULL.kept, 0, 0.3 * 2048),
    ({"lora": None, "pure_bf16": True}, False, 28 * memory.FULL_BF16.kept, 0, 0.3 * 2048),
    ({}, False, 28 * ADAPTER.kept, 0, 0.3 * 2048),
    ({}, True, 28 * ADAPTER.checkpointed + ADAPTER.at_peak, 0, 0.3 * 2048),
    ({"lora": replace(LORA, use_dora=True)}, False, 28 * DORA.kept, 0, 0.3 * 2048),
]


def test_without_a_trace_a_step_is_layers_copies_and_loss() -> None:
    for changes, checkpoint, per_unit, n_copied, rows in PRIORS:
        method = "full" if changes.get("lora", LORA) is None else "lora"
        draft = draft_of(H100, packing=seq(2048), **{"method": method, "lora": LORA, **changes})
        made = memory.predict_memory(draft, 1, checkpoint=checkpoint)
        assert made is not None
        layers, loss = 2048 * 1024 * per_unit, rows * memory.LOSS_BYTES_PER_VOCAB * 151936
        assert made.step_bytes == int(layers + n_copied + loss)


def test_targets_of_unknown_shape_are_counted_by_the_trace() -> None:
    lora = replace(LORA, targets=("mixer",))
    draft = draft_of(None, trace=TRACE, method="lora", lora=lora)
    assert draft.n_trainable == LINE.gradient_bytes / 4
    known = replace(draft, spec=plan_spec(method="lora", lora=LORA))
    assert known.n_trainable == adapter_weights(QWEN_06B, LORA)


def test_an_unknown_architecture_has_no_peak() -> None:
    failed = MemoryTrace(lines=(), unavailable_reason="flex attention is not traced")
    facts = replace(QWEN_06B, model_type="of-tomorrow")
    unknown = draft_of(H100, trace=failed, facts=facts)
    assert "no figures for the architecture of-tomorrow" in memory.peak_reason(unknown)
    assert memory.predict_memory(unknown, 1, checkpoint=False) is None


GIB = 1 << 30
RTX_2060 = card("RTX 2060")


def traced(kept: int, checkpointed: int) -> MemoryTrace:
    """Return a trace in which each row of 1,024 tokens adds so many bytes."""
    lines = tuple(
        MemoryLine(
            checkpoint_activations=on, model_bytes=GIB, gradient_bytes=0,
            n_tokens=(1024, 16 * 1024), step_bytes=(row, 16 * row),
        )
        for on, row in ((False, kept), (True, checkpointed))
    )  # fmt: skip
    return MemoryTrace(lines=lines)


def chosen(trace: MemoryTrace, **changes: object) -> tuple[int, bool, PlanDraft]:
    settings = {"batch_size": None, "optim": "adamw_8bit", **changes}
    draft = draft_of(RTX_2060, packing=seq(1024), n_params=0, trace=trace, **settings)
    micro, checkpoint = choose_micro_batch(draft)
    return micro, checkpoint, draft


SPARED = "; batch_size 4 with 4 times the gradient_accumulation_steps fits without"


def test_the_chosen_micro_batch_and_its_reason() -> None:
    for kept, checkpointed, changes, expected, setting, message in (
        # 1 GiB of model, 8 x 1/3 GiB of step, 8 % and 1 GiB of reserve; twice the step.
        (GIB // 3, GIB // 100, {}, (8, False), "batch_size", "5.0 of 5.6 GiB, and 7.8 with 16"),
        # A card that would idle checkpoints just enough, unless that allows no more rows.
        (GIB, GIB // 100, {}, (BUSY_TOKENS // 1024, True), "batch_size", "judgment"),
        (GIB, GIB, {}, (2, False), "batch_size", ""),
        (GIB, GIB // 100, {"gradient_checkpointing": False}, (2, False), "batch_size", ""),
        # The manifest's value is kept, and checkpointed if necessary.
        (GIB, GIB // 100, {"batch_size": 2}, (2, False), "batch_size", ""),
        (GIB, GIB // 100, {"batch_size": 12}, (12, True), "batch_size", ""),
        (GIB // 2, 16 << 20, {"batch_size": 16}, (16, True), "gradient_checkpointing", SPARED),
        # One row fits without, which leaves the card idle.
        (2 * GIB, 16 << 20, {"batch_size": 16}, (16, True), "gradient_checkpointing", "without"),
    ):
        micro, checkpoint, draft = chosen(traced(kept, checkpointed), **changes)
        assert (micro, checkpoint) == expected
        because = draft.reasons[setting].because
        assert message in because and ("fits without" in because) is (message == SPARED)


def test_a_micro_batch_beyond_the_card_is_rejected_with_the_most_rows_that_fit() -> None:
    """Model and reserve take 2 GiB of 5.6, each row 1.08."""
    ways = "to auto, or to 2 or less with 6 times the gradient_accumulation_steps"
    with pytest.raises(HardwareError, match=f"batch_size 11 needs .* has 5.6; set it {ways}"):
        chosen(traced(GIB, GIB), batch_size=11)
    # 3 rows of 1 GiB and 1 of model: 5.32 GiB of 5.59, between 92 and 100 %.
    full = chosen(traced(GIB, GIB), batch_size=3)[2]
    assert "fill the card completely" in full.reasons["batch_size"].because
    with pytest.raises(HardwareError, match="one row of 1024 tokens"):
        chosen(traced(9 * GIB, 9 * GIB), batch_size=2)
    with pytest.raises(HardwareError, match="set gradient_checkpointing to auto, or use a larger"):
        chosen(traced(kept=9 * GIB, checkpointed=GIB), gradient_checkpointing=False)
    with pytest.raises(HardwareError, match="has less; use a larger"):
        chosen(traced(9 * GIB, 9 * GIB), gradient_checkpointing=False)


def test_8b_is_fully_trained_on_80_gb_only_in_bf16() -> None:
    facts = ModelFacts(
        n_layers=36, hidden_size=4096, n_heads=32, n_kv_heads=8, head_dim=128,
        intermediate_size=12_288, vocab_size=151_936, tie_word_embeddings=False, model_type="qwen3",
    )  # fmt: skip
    full = {"facts": facts, "n_params": count_weights(facts), "method": "full", "lora": None}
    fix = "; set pure_bf16 to true and optim to adamw_8bit, or use a larger card"
    for settings in ({}, {"optim": "adamw_8bit"}):
        with pytest.raises(HardwareError, match=fix):
            plan(card("H100 SXM"), **full, **settings)
    made = plan(card("H100 SXM"), **full, pure_bf16=True, optim="adamw_8bit")
    assert made.memory is not None and made.precision == "bf16"
    assert made.memory.model_bytes == 2 * made.n_params_trainable
    assert made.memory.optimizer_bytes == 4 * made.n_params_trainable
    # A card that is too small even for that.
    with pytest.raises(HardwareError, match="has less; use a larger card"):
        plan(card("L40S"), **full)
