"""What the prediction of peak memory says of optimisers and of shares of a model."""

import math
from dataclasses import replace
from typing import Any

import pytest
from support import plan_spec
from test_resolve import PACKING, QWEN_06B

from expertflow.plan.draft import Draft
from expertflow.plan.memory import RESERVE_FRACTION

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
