"""What the prediction of peak memory says of optimisers and of shares of a model."""

import math
from typing import Any

import pytest
from msgspec.structs import replace
from support import LORA, plan_spec
from test_resolve import PACKING, QWEN_06B, card

from expertflow.plan.cost_records import MemoryLine, MemoryParts, MemoryTrace
from expertflow.plan.draft import Draft
from expertflow.plan.flops import adapter_weights
from expertflow.plan.memory import (
    RESERVE_BYTES,
    RESERVE_FRACTION,
    Step,
    peak_reason,
    predict_memory,
    total_bytes,
)

N_PARAMS = 596_049_920


def peak_bytes(n_tokens: int = 512, **changes: Any) -> int:
    packing = replace(PACKING, sequence_length_tokens=n_tokens)
    draft = Draft("e", plan_spec(**changes), packing, QWEN_06B, N_PARAMS, None)
    peak = draft.peak_bytes(1, "bf16", False)
    assert peak is not None
    return peak


def bytes_per_parameter(less: int, more: int) -> float:
    return (more - less) / (1 + RESERVE_FRACTION) / N_PARAMS


def test_moments_in_8_bits_are_a_quarter() -> None:
    assert math.isclose(
        bytes_per_parameter(peak_bytes(optim="adamw_8bit"), peak_bytes()), 6, abs_tol=1e-6
    )


@pytest.mark.parametrize("n_tokens", [64, 512])
def test_shares_divide_the_model_and_not_the_activations(n_tokens: int) -> None:
    whole = peak_bytes(n_tokens)
    shared = peak_bytes(n_tokens, parallel="fsdp", world_size=4)
    assert math.isclose(bytes_per_parameter(shared, whole), 16 * 3 / 4, abs_tol=1e-6)


def test_copies_share_nothing() -> None:
    assert peak_bytes(parallel="ddp", world_size=4) == peak_bytes()


LINE = MemoryLine(
    checkpoint_activations=False, model_bytes=4000, gradient_bytes=400, n_tokens=(100, 400, 1600),
    step_bytes=(1000, 1000, 13_000),
)  # fmt: skip
TRACE = MemoryTrace(precision="bf16", lines=(LINE,))


def step(**changes: Any) -> Step:
    settings: dict[str, Any] = {
        "method": "lora", "lora": LORA, "precision": "bf16", "optim": "adamw_torch_fused",
        "n_shares": 1, "n_params_total": 2000, "n_params_trainable": 100, "n_tokens": 400,
        "supervised_fraction": 0.3, "checkpoint_activations": False,
    }  # fmt: skip
    return Step(**{**settings, **changes})


def parts(**changes: Any) -> MemoryParts:
    made = predict_memory(QWEN_06B, step(**changes), TRACE)
    assert made is not None
    return made


def test_the_parts_of_a_traced_step_add_up() -> None:
    made = parts()
    assert (made.model_bytes, made.optimizer_bytes, made.step_bytes) == (4000, 400 + 800, 1000)
    assert made.reserve_bytes == RESERVE_BYTES + int(RESERVE_FRACTION * 6200)
    assert total_bytes(made) == 6200 + made.reserve_bytes


@pytest.mark.parametrize(
    ("n_tokens", "n_bytes"), [(100, 1000), (250, 1000), (700, 4000), (1600, 13_000), (3200, 29_000)]
)
def test_between_traced_points_is_a_straight_line(n_tokens: int, n_bytes: int) -> None:
    assert parts(n_tokens=n_tokens).step_bytes == n_bytes


def test_shares_divide_what_was_traced_of_the_model() -> None:
    whole, shared = parts(), parts(n_shares=4)
    assert shared.model_bytes == whole.model_bytes / 4
    assert shared.optimizer_bytes == whole.optimizer_bytes / 4
    assert shared.step_bytes == whole.step_bytes


def test_a_trace_holds_for_half_precision_of_either_kind() -> None:
    assert parts(precision="fp16") == parts()
    assert parts(precision="fp32").step_bytes != parts().step_bytes


def test_only_linear_maps_are_held_in_4_bits() -> None:
    """The embedding of 0.6B, 155.6 M weights of 596 M, stays in 16 bits."""
    settings = {"n_params_total": N_PARAMS, "n_params_trainable": 0}
    made = predict_memory(QWEN_06B, step(method="qlora", **settings), None)
    assert made is not None
    n_linear = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert made.model_bytes == int(0.52 * n_linear + 2 * (N_PARAMS - n_linear))


def test_targets_of_unknown_shape_are_counted_by_the_trace() -> None:
    lora = replace(LORA, targets=("mixer",))
    spec = plan_spec(method="lora", lora=lora)
    draft = Draft("e", spec, PACKING, QWEN_06B, N_PARAMS, None, TRACE)
    assert draft.n_trainable == LINE.gradient_bytes / 4
    known = replace(draft, spec=plan_spec(method="lora", lora=LORA))
    assert known.n_trainable == adapter_weights(QWEN_06B, LORA)


def test_the_reason_says_what_the_peak_rests_on() -> None:
    failed = MemoryTrace(precision="", lines=(), hindrance="flex attention is not traced")
    gpu = card("H100 SXM")
    assert peak_reason(QWEN_06B, TRACE, gpu).startswith("live bytes")
    assert "flex attention is not traced" in peak_reason(QWEN_06B, failed, gpu)
    assert "not traced on a CPU" in peak_reason(QWEN_06B, None, None)
    unknown = replace(QWEN_06B, model_type="of-tomorrow")
    assert "no figures for the architecture of-tomorrow" in peak_reason(unknown, failed, gpu)
    assert predict_memory(unknown, step(), failed) is None
