"""What a plan resolves to: batch, hours, steps, warm-up, loader and precision."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_fixtures import PACKING, QWEN_06B, SPLIT, because_of, card, plan, reasons_of, seq
from support import LORA, plan_spec

from expertflow.core.errors import ConfigError
from expertflow.core.format import GIB
from expertflow.core.settings import name_of
from expertflow.hardware.gpu_table import describe_unlisted
from expertflow.plan.records import TrainPlan
from expertflow.plan.settings import Training
from expertflow.plan.switches import (
    check_settings,
    choose_grouping,
    choose_loader,
    choose_precision,
    choose_steps,
    choose_tf32,
    choose_warmup,
)


def checkpointing_reason(made: TrainPlan) -> str:
    return because_of(made)[name_of(Training.gradient_checkpointing)]


def test_tiers_decide_if_memory_cannot_be_predicted() -> None:
    unknown = replace(QWEN_06B, model_type="starcoder2")
    for name, rows in (("RTX 2060", 4), ("RTX 4090", 8), ("H100 SXM", 8)):
        made = plan(card(name), facts=unknown)
        assert made.gradient_checkpointing and made.batch_size == rows
        assert "on, since memory cannot be predicted" in checkpointing_reason(made)
        told = plan(card(name), facts=unknown, gradient_checkpointing=False)
        assert not told.gradient_checkpointing
        assert checkpointing_reason(told) == "gradient_checkpointing from the manifest"
        given = plan(card(name), facts=unknown, batch_size=rows)
        assert not given.gradient_checkpointing
        assert "memory cannot be predicted" in checkpointing_reason(given)
        assert made.predicted_peak_bytes is None
        assert "starcoder2" in made.predicted_peak_reason


def test_copied_thresholds_yield_the_same_rows_as_before() -> None:
    """B's tiers: 7.0, 4.0 and 2.0 GB for 8, 4 and fewer rows; its card of 6 GB got 4."""
    unknown = replace(QWEN_06B, model_type="starcoder2")
    names = (Training.gpu_memory_threshold_large_gb, Training.gpu_memory_threshold_medium_gb,
             Training.gpu_memory_threshold_small_gb)  # fmt: skip
    pasted = dict(zip(map(name_of, names), (7.0, 4.0, 2.0), strict=True))
    for size_gb, rows in ((7, 8), (6, 4), (4, 4), (2, 2), (1, 1)):
        small = replace(card("RTX 2060"), memory_total_bytes=size_gb * 10**9)
        assert plan(small, facts=unknown, **pasted).batch_size == rows


def test_a_budget_that_cannot_be_checked_is_rejected() -> None:
    for gpu in (None, card("H100 SXM")):
        with pytest.raises(ConfigError, match="max_usd is set but cannot be checked"):
            plan(gpu, max_usd=5.0)


@pytest.mark.parametrize(("n_cards", "rows"), [(1, 16), (3, 12), (4, 16), (5, 20), (32, 32)])
def test_cards_share_the_requested_batch(n_cards: int, rows: int) -> None:
    made = plan(card("H100 SXM"), seq(512), world_size=n_cards)
    assert made.global_batch_sequences == rows
    told = reasons_of(made)
    assert told["gradient_accumulation_steps"].because.endswith(f" = {rows}")
    assert told["batch_size"].value == str(made.batch_size)
    assert told["gradient_checkpointing"].value == str(made.gradient_checkpointing)
    assert made.memory is not None
    assert made.memory.total_bytes == made.predicted_peak_bytes
    assert made.next_micro_batch_peak_bytes is not None
    assert made.next_micro_batch_peak_bytes > made.memory.total_bytes


def test_fewer_rows_per_card_may_need_no_checkpointing() -> None:
    small = replace(card("RTX 4090"), memory_total_bytes=10 * 10**9)
    one, eight = (plan(small, seq(1024), world_size=n) for n in (1, 8))
    assert (one.gradient_checkpointing, eight.gradient_checkpointing) == (True, False)
    # If they do need it, what they would need without is stated.
    llama_8b = replace(
        QWEN_06B, n_layers=32, hidden_size=4096, n_heads=32, intermediate_size=14_336,
        model_type="llama",
    )  # fmt: skip
    made = plan(card("RTX 4090"), seq(512), llama_8b, n_params=8 * 10**9, world_size=8)
    assert made.batch_size == 2 and made.gradient_checkpointing
    assert made.without_checkpointing_peak_bytes is not None
    peak = f"predicted {made.without_checkpointing_peak_bytes / GIB:.1f} GiB without"
    assert peak in checkpointing_reason(made)


def test_cards_share_the_hours_and_a_configured_price_is_that_of_the_machine() -> None:
    one, four = (plan(card("H100 SXM"), world_size=n).cost for n in (1, 4))
    assert one.predicted_hours is not None and four.predicted_hours is not None
    assert four.predicted_hours == pytest.approx(one.predicted_hours / 4, rel=0.05)
    assert "4 cards" in four.reason and "cards" not in one.reason
    cost = plan(card("H100 SXM"), price_usd_per_hour=8.0, world_size=4).cost
    assert cost.price_usd_per_hour == 8.0
    assert cost.predicted_usd == pytest.approx(8.0 * four.predicted_hours)
    # Without a price of this card there are no dollars.
    prices = {"H100 SXM": {"usd_per_hour": 2.5, "as_of": "2026-11-01"}}
    unpriced = plan(card("L4"), prices=prices).cost
    assert (unpriced.price_usd_per_hour, unpriced.predicted_usd) == (None, None)


def test_steps_cover_the_rows_once_per_epoch() -> None:
    made = plan(card("H100 SXM"), num_train_epochs=1.0)
    assert made.n_steps * made.global_batch_sequences >= SPLIT.n_sequences
    assert (made.n_steps - 1) * made.global_batch_sequences < SPLIT.n_sequences
    assert made.predicted_tokens == SPLIT.n_tokens
    on_cpu = plan(None, save_steps=None, max_steps=7)
    assert (on_cpu.batch_size, on_cpu.gradient_accumulation_steps) == (8, 2)
    assert on_cpu.save_steps == 7
    assert made.may_halve_micro_batch
    assert not plan(card("H100 SXM"), batch_size=2).may_halve_micro_batch
    for ratio, n_decay_steps in ((0.25, 25), (1.0, 80)):
        settings = {"max_steps": 100, "warmup_ratio": 0.2, "lr_decay_ratio": ratio}
        assert plan(None, **settings).n_decay_steps == n_decay_steps


def test_evaluations_are_about_ten_and_take_little_of_a_run() -> None:
    for n_held_out, n_steps, eval_steps in (
        (10, 1000, 100), (10, 105, 11), (10, 12, 2), (10, 7, 2), (10, 1, 1), (10**5, 306, 62),
        (10**7, 306, 306),
    ):  # fmt: skip
        packing = replace(PACKING, held_out=replace(SPLIT, n_tokens=n_held_out))
        made = plan(card("H100 SXM"), packing, max_steps=n_steps)
        assert made.eval_steps == eval_steps
        n_evals = "at the end" if n_held_out == 10**7 else f"{-(-n_steps // eval_steps)} in the run"
        assert reasons_of(made)["eval_steps"].because.startswith(n_evals)
    asked = plan(card("H100 SXM"), packing, eval_steps=3)
    assert asked.eval_steps == 3
    assert "manifest" in reasons_of(asked)["eval_steps"].because


def test_workers_load_unpacked_rows_or_as_set() -> None:
    for loader, packing, n_workers, expected in (
        (None, "bfd", 8, ("thread", 0)),
        (None, "concat", 8, ("thread", 0)),
        (None, "none", 0, ("thread", 0)),
        (None, "none", 8, ("workers", 8)),
        ("thread", "none", 8, ("thread", 0)),
        ("workers", "bfd", 8, ("workers", 8)),
    ):
        spec = plan_spec(loader=loader, dataloader_num_workers=n_workers)
        made = choose_loader(spec, packing)
        chosen = {name_of(setting): value for setting, (value, _) in made.items()}
        assert (chosen["loader"], chosen["dataloader_num_workers"]) == expected


def test_rows_are_grouped_if_they_differ_in_length() -> None:
    wanted, unwanted = (plan_spec(group_by_length=on) for on in (True, False))
    assert choose_grouping(wanted, "none") == (True, "group_by_length from the manifest")
    assert choose_grouping(unwanted, "none") == (False, "group_by_length from the manifest")
    assert choose_grouping(wanted, "bfd") == (False, "packing bfd: all rows have one length")


def test_bf16_weights_are_fully_trained_if_the_card_has_bf16() -> None:
    spec = plan_spec(pure_bf16=True)
    assert choose_precision(spec, None)[0] == choose_precision(spec, card("H100 SXM"))[0] == "bf16"
    with pytest.raises(ConfigError, match=r"pure_bf16: RTX 2060 does not support bf16; set it to"):
        choose_precision(spec, card("RTX 2060"))
    assert choose_tf32(spec, describe_unlisted("RTX A6000", compute_capability="8.6"))[0]
    for changes in ({"method": "lora", "lora": LORA}, {"bf16": False}):
        with pytest.raises(ConfigError, match=r"pure_bf16 (is|needs) .*; set"):
            check_settings(plan_spec(pure_bf16=True, **changes), name=str)


def test_the_warm_up_reason_names_the_deciding_bound() -> None:
    for steps, warmup, words in (
        (600, 60, "0.1 x 600 steps = 60, rounded"),
        (20_000, 1000, "0.1 x 20000 steps = 2e+03; warmup_steps_max is 1000"),
    ):
        assert choose_warmup(Training(), steps) == (warmup, words)
    assert choose_warmup(Training(), 1)[0] == choose_warmup(Training(), 2)[0] == 0
    assert choose_warmup(Training(override_min_warmup=False), 5)[0] == 4


@given(st.integers(1, 10**6), st.floats(0, 0.99), st.integers(0, 500), st.booleans())
def test_warm_up_always_ends(total: int, ratio: float, minimum: int, override: bool) -> None:
    settings = Training(warmup_ratio=ratio, warmup_steps_min=minimum, override_min_warmup=override)
    assert 0 <= choose_warmup(settings, total)[0] < total


def test_steps_follow_from_epochs_tokens_or_are_set() -> None:
    def steps(**changes: Any) -> int:
        settings = Training(**{"num_train_epochs": 1.5, **changes})
        return choose_steps(settings, 10, tokens_per_epoch=1000)[0]

    assert steps() == 15
    assert steps(max_steps=7) == 7
    assert steps(target_tokens=2000) == 20
    assert steps(target_tokens=10**6, max_epochs=3.0) == 30
    assert steps(target_tokens=1, min_epochs=2.0) == 20
    assert steps(num_train_epochs=0.01) == 1
