"""What the prediction of peak memory says of optimizers and of shares of a model."""

import math
from typing import Any

from msgspec.structs import replace
from plan_fixtures import N_PARAMS, QWEN_06B, card, draft_of, seq
from support import LORA, plan_spec

from expertflow.plan import memory
from expertflow.plan.flops import adapter_weights
from expertflow.plan.records import MemoryLine, MemoryParts, MemoryTrace

H100 = card("H100 SXM")


def peak_of(n_tokens: int = 512, **changes: Any) -> int:
    peak = memory.peak_bytes(draft_of(H100, packing=seq(n_tokens), **changes), 1, checkpoint=False)
    assert peak is not None
    return peak


def bytes_per_parameter(less: int, more: int) -> float:
    return (more - less) / (1 + memory.RESERVE_FRACTION) / N_PARAMS


def test_moments_in_8_bits_are_a_quarter_and_those_of_bf16_weights_a_half() -> None:
    less = bytes_per_parameter(peak_of(optim="adamw_8bit"), peak_of())
    assert math.isclose(less, 6, abs_tol=1e-6)
    both = (plan_spec(pure_bf16=True, optim=optim) for optim in ("adamw_8bit", "adamw_torch"))
    per_weight = (memory.standing_bytes(spec, QWEN_06B) / N_PARAMS for spec in both)
    assert [round(n, 2) for n in per_weight] == [6, 8]


def test_shares_divide_the_model_and_not_the_activations() -> None:
    for n_tokens in (64, 512):
        shared = peak_of(n_tokens, parallel="fsdp", world_size=4)
        less = bytes_per_parameter(shared, peak_of(n_tokens))
        assert math.isclose(less, 16 * 3 / 4, abs_tol=1e-6)


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


def test_between_traced_points_is_a_straight_line() -> None:
    expected = {100: 1000, 250: 1000, 700: 4000, 1600: 13_000, 3200: 29_000}
    assert {n: parts(n_tokens=n).step_bytes for n in expected} == expected


def test_a_trace_holds_for_half_precision_of_either_kind() -> None:
    assert parts(bf16=False, fp16=True) == parts()
    assert parts(bf16=False).step_bytes != parts().step_bytes


def test_only_linear_maps_are_held_in_4_bits() -> None:
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


def test_the_logits_of_a_loss_chunk_take_a_hundredth_of_the_card() -> None:
    assert memory.loss_chunk_rows(151_936, H100.memory_total_bytes, trained=False) == 2560
    assert memory.loss_chunk_rows(151_936, 24 << 30, trained=False) == 768
    for card_bytes in (None, 8 << 30):
        assert memory.loss_chunk_rows(151_936, card_bytes, trained=False) == 256
        assert memory.loss_chunk_rows(151_936, card_bytes, trained=True) == 1024


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
