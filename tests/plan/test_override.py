"""Hyper-parameters given by hand: what they change, and what follows from them."""

from typing import Any

import pytest
from msgspec.structs import replace
from plan_fixtures import N_PARAMS, PACKING, QWEN_06B, because_of
from plan_fixtures import plan as plan_for
from support import LORA

from expertflow.core.errors import ConfigError
from expertflow.plan.override import FOLLOWS, override
from expertflow.plan.records import ClaimCheck, Reason, TrainPlan

FULL: dict[str, Any] = {
    "method": "full", "lora": None, "batch_size": 4, "gradient_accumulation_steps": 1,
    "max_steps": 40,
}  # fmt: skip
MADE = plan_for(None, **FULL)
ADAPTED = plan_for(None, **{**FULL, "method": "lora", "lora": LORA})


def changed(made: TrainPlan, **changes: object) -> TrainPlan:
    return override(made, changes, packing=PACKING, facts=QWEN_06B)


def test_a_plain_setting_is_taken_over_and_explained() -> None:
    plan = changed(MADE, learning_rate=3e-6)
    assert (plan.learning_rate, plan.n_steps) == (3e-6, MADE.n_steps)
    [reason] = [r for r in plan.reasons if r.setting == "learning_rate"]
    assert (reason.value, reason.because) == ("3e-06", "given by hand")
    assert plan.predicted_peak_bytes is None
    assert plan.cost.predicted_usd is None


def test_a_larger_batch_makes_fewer_steps_of_as_many_epochs() -> None:
    old = plan_for(None, **{**FULL, "max_steps": None, "num_train_epochs": 8.0})
    plan = changed(old, batch_size=8)
    assert plan.global_batch_sequences == 2 * old.global_batch_sequences
    assert plan.n_steps_per_epoch == -(-old.n_sequences // plan.global_batch_sequences)
    assert plan.n_steps == 8 * plan.n_steps_per_epoch < old.n_steps
    assert plan.n_warmup_steps == round(0.1 * plan.n_steps)
    assert not plan.may_halve_micro_batch
    assert (old.eval_steps, plan.eval_steps) == (old.n_steps, plan.n_steps)
    assert changed(old, eval_steps=7).eval_steps == 7
    assert changed(old, batch_size=8, max_steps=40).n_steps == 40


def test_steps_and_epochs_are_taken_at_their_word() -> None:
    assert changed(MADE, max_steps=7).n_steps == 7
    two = changed(MADE, num_train_epochs=2.0)
    assert two.n_steps == 2 * two.n_steps_per_epoch
    assert changed(MADE, max_steps=7, warmup_ratio=0.5).n_warmup_steps == 4
    with pytest.raises(ConfigError, match="--warmup-steps-min 9 is not below max_steps 7"):
        changed(MADE, max_steps=7, warmup_steps_min=9, override_min_warmup=False)


def test_an_adapter_is_changed_or_taken_away() -> None:
    plan = changed(ADAPTED, lora_r=2)
    assert plan.lora is not None and plan.lora.r == 2
    assert plan.n_params_trainable == ADAPTED.n_params_trainable // 2
    full = changed(ADAPTED, method="full")
    assert full.lora is None
    assert full.n_params_trainable == full.n_params_total == N_PARAMS
    with pytest.raises(ConfigError, match="drop --lora-r"):
        changed(ADAPTED, method="full", lora_r=4)
    # One from nothing needs all its settings.
    with pytest.raises(ConfigError, match="give --lora-"):
        changed(MADE, method="lora", lora_r=4)


def test_what_the_old_plan_predicted_is_not_kept() -> None:
    claims = (ClaimCheck(text="t", holds=True, finding="f"),)
    budget = Reason(setting="max_usd", value="5", because="the prediction is $3, at most $4")
    made = replace(ADAPTED, claims=claims, reasons=(*ADAPTED.reasons, budget))
    plan = changed(made, learning_rate=1.0)
    assert (plan.claims, plan.options) == ((), ())
    assert because_of(plan)["max_usd"].startswith("not held: ")
    assert "no budget is held" in plan.cost.reason
    assert "loses at most" in because_of(made)["save_steps"]
    assert not any("loses at most" in r.because or "predicted 2" in r.because for r in plan.reasons)


def test_a_changed_share_of_the_work_is_explained_and_not_priced() -> None:
    made = plan_for(None, **FULL, price_usd_per_hour=2.0)
    assert changed(made, seed=5).cost.price_usd_per_hour == 2.0
    plan = changed(made, world_size=2)
    assert because_of(plan)["parallel"].startswith("2 processes")
    assert plan.cost.price_usd_per_hour is None
    assert "for world_size 1" in plan.cost.reason


def test_a_cpu_trains_in_half_precision_only_where_asked_by_hand() -> None:
    assert (MADE.precision, MADE.bf16) == ("fp32", False)
    plan = changed(MADE, bf16=True)
    assert (plan.precision, plan.bf16) == ("bf16", True)
    assert because_of(plan)["precision"] == FOLLOWS


def test_contradictions() -> None:
    sharded = {"method": "qlora", "parallel": "fsdp", "world_size": 2}
    changes: dict[str, Any]
    for changes, message in (
        (sharded, "--parallel fsdp cannot share"),
        ({"min_delta": 0.1}, "--min-delta has no effect without patience"),
        ({"dataloader_num_workers": 2}, "--dataloader-num-workers 2 has no effect: the thread"),
        ({"use_tf32": True}, "--use-tf32 True has no effect: TF32 is a mode of CUDA cards"),
        ({"bf16": True, "fp16": True}, "--bf16 and fp16 are both true"),
        ({"lora_targets": ("q_proj", "lm_head")}, "--lora-targets names lm_head"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            changed(ADAPTED, **changes)
        assert "\n" not in str(caught.value) and "training." not in str(caught.value)
