"""Which micro-batch is chosen, and what the reason says."""

from typing import Any

import pytest
from plan_fixtures import card, draft_of, plan, seq

from expertflow.core.errors import HardwareError
from expertflow.plan.draft import PlanDraft
from expertflow.plan.flops import count_weights
from expertflow.plan.memory import BUSY_TOKENS, choose_micro_batch
from expertflow.plan.records import USABLE_FRACTION, MemoryLine, MemoryTrace, ModelFacts

GIB = 1 << 30
RTX_2060 = card("RTX 2060")


def traced(kept: int, checkpointed: int, n_tokens: int = 1024) -> MemoryTrace:
    """Return a trace in which each row of ``n_tokens`` adds so many bytes."""
    lines = tuple(
        MemoryLine(
            checkpoint_activations=on, model_bytes=GIB, gradient_bytes=0,
            n_tokens=(n_tokens, 16 * n_tokens), step_bytes=(row, 16 * row),
        )
        for on, row in ((False, kept), (True, checkpointed))
    )  # fmt: skip
    return MemoryTrace(lines=lines)


def chosen(trace: MemoryTrace, **changes: object) -> tuple[int, bool, PlanDraft]:
    settings = {"batch_size": None, "optim": "adamw_8bit", **changes}
    draft = draft_of(RTX_2060, packing=seq(1024), n_params=0, trace=trace, **settings)
    micro, checkpoint = choose_micro_batch(draft)
    return micro, checkpoint, draft


SPARED = "; batch_size 4 with gradient_accumulation_steps 4 times as many fits without"


@pytest.mark.parametrize(
    ("kept", "checkpointed", "changes", "expected", "setting", "said"),
    [
        # 1 GiB of model, 8 x 1/3 GiB of step, 8 % and 1 GiB of reserve; twice the step.
        (GIB // 3, GIB // 100, {}, (8, False), "batch_size", "5.0 of 5.6 GiB, and 7.8 with 16"),
        # A card that would idle checkpoints just enough, unless that brings no more rows.
        (GIB, GIB // 100, {}, (BUSY_TOKENS // 1024, True), "batch_size", "judgment"),
        (GIB, GIB, {}, (2, False), "batch_size", ""),
        (GIB, GIB // 100, {"gradient_checkpointing": False}, (2, False), "batch_size", ""),
        # What the manifest gives is kept, and checkpointed if need be.
        (GIB, GIB // 100, {"batch_size": 2}, (2, False), "batch_size", ""),
        (GIB, GIB // 100, {"batch_size": 12}, (12, True), "batch_size", ""),
        (GIB // 2, 16 << 20, {"batch_size": 16}, (16, True), "gradient_checkpointing", SPARED),
        # One row fits without, which leaves the card idle.
        (2 * GIB, 16 << 20, {"batch_size": 16}, (16, True), "gradient_checkpointing", "without"),
    ],
)
def test_what_is_chosen_and_why(
    kept: int, checkpointed: int, changes: Any, expected: tuple[int, bool], setting: str, said: str
) -> None:
    micro, checkpoint, draft = chosen(traced(kept, checkpointed), **changes)
    assert (micro, checkpoint) == expected
    because = draft.reasons[setting].because
    assert said in because and ("fits without" in because) is (said == SPARED)


def test_a_given_micro_batch_beyond_the_card_is_refused_with_the_most_rows_that_fit() -> None:
    """Model and reserve take 2 GiB of 5.6, each row 1.08."""
    ways = "to auto, or to 2 or less with gradient_accumulation_steps 6 times as many"
    with pytest.raises(HardwareError, match=f"batch_size 11 needs .* has 5.6; set it {ways}"):
        chosen(traced(GIB, GIB), batch_size=11)
    # 3 rows of 1 GiB and 1 of model: 5.32 GiB of 5.59, above 92 % and below all of it.
    full = chosen(traced(GIB, GIB), batch_size=3)[2]
    assert "to the brim" in full.reasons["batch_size"].because
    with pytest.raises(HardwareError, match="one row of 1024 tokens"):
        chosen(traced(9 * GIB, 9 * GIB), batch_size=2)
    with pytest.raises(HardwareError, match="set gradient_checkpointing to auto, or use a larger"):
        chosen(traced(kept=9 * GIB, checkpointed=GIB), gradient_checkpointing=False)


def test_8b_is_trained_as_a_whole_on_80_gb_in_bf16_alone() -> None:
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
    # A card that is too small for that as well.
    with pytest.raises(HardwareError, match="has less; use a larger card"):
        plan(card("L40S"), **full)


def test_what_is_chosen_fits() -> None:
    for name in ("RTX 2060", "RTX 4090", "H100 SXM"):
        for length in (256, 1024, 4096):
            gpu = card(name)
            made = plan(gpu, seq(length))
            assert made.predicted_peak_bytes is not None and gpu.memory_total_bytes is not None
            assert made.predicted_peak_bytes <= USABLE_FRACTION * gpu.memory_total_bytes
