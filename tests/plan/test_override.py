"""Hyper-parameters given by hand: what they change, and what follows from them."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from support import LORA, write_tiny_run

from expertflow.core.errors import ConfigError
from expertflow.core.records import read_record
from expertflow.plan.override import FOLLOWS, override
from expertflow.plan.records import ClaimCheck, Reason, TrainPlan
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import ModelRecord


class Made:
    def __init__(self, folder: Path, **changes: object) -> None:
        write_tiny_run(folder, n_steps=40, **changes)
        self.plan = read_record(TrainPlan, folder / "plan.json")
        self.packing = read_record(PackingRecord, folder / "packing.json")
        self.facts = read_record(ModelRecord, folder / "model.json").facts

    def changed(self, **changes: object) -> TrainPlan:
        return override(self.plan, changes, packing=self.packing, facts=self.facts)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_plain_setting_is_taken_over_and_explained(made: Made) -> None:
    plan = made.changed(learning_rate=3e-6)
    assert plan.learning_rate == 3e-6
    assert plan.n_steps == made.plan.n_steps
    [reason] = [r for r in plan.reasons if r.setting == "learning_rate"]
    assert (reason.value, reason.because) == ("3e-06", "given by hand")
    assert plan.predicted_peak_bytes is None
    assert plan.cost.predicted_usd is None


def test_a_larger_batch_makes_fewer_steps_of_as_many_epochs(tmp_path: Path) -> None:
    made = Made(tmp_path, max_steps=None, num_train_epochs=8.0)
    old, plan = made.plan, made.changed(batch_size=8)
    assert plan.global_batch_sequences == 2 * old.global_batch_sequences
    assert plan.n_steps_per_epoch == -(-old.n_sequences // plan.global_batch_sequences)
    assert plan.n_steps == 8 * plan.n_steps_per_epoch < old.n_steps
    assert plan.n_warmup_steps == round(0.1 * plan.n_steps)
    assert not plan.may_halve_micro_batch
    assert plan.eval_steps == plan.n_steps_per_epoch
    assert made.changed(batch_size=8, max_steps=40).n_steps == 40


def test_steps_and_epochs_are_taken_at_their_word(made: Made) -> None:
    assert made.changed(max_steps=7).n_steps == 7
    two = made.changed(num_train_epochs=2.0)
    assert two.n_steps == 2 * two.n_steps_per_epoch
    assert made.changed(max_steps=7, warmup_ratio=0.5).n_warmup_steps == 4
    with pytest.raises(ConfigError, match="--warmup-steps-min 9 is not below max_steps 7"):
        made.changed(max_steps=7, warmup_steps_min=9, override_min_warmup=False)


def test_an_adapter_is_changed_or_taken_away(tmp_path: Path) -> None:
    made = Made(tmp_path, lora=LORA)
    plan = made.changed(lora_r=2)
    assert plan.lora is not None and plan.lora.r == 2
    assert plan.n_params_trainable == made.plan.n_params_trainable // 2
    full = made.changed(method="full")
    assert full.lora is None
    assert full.n_params_trainable == full.n_params_total == 20_000
    with pytest.raises(ConfigError, match="drop --lora-r"):
        made.changed(method="full", lora_r=4)


def test_an_adapter_from_nothing_needs_all_its_settings(made: Made) -> None:
    with pytest.raises(ConfigError, match="give --lora-"):
        made.changed(method="lora", lora_r=4)


def because(plan: TrainPlan, *, but_not: str) -> dict[str, str]:
    return {r.setting: r.because for r in plan.reasons if r.because != but_not}


def test_what_the_old_plan_predicted_is_not_kept(tmp_path: Path) -> None:
    made = Made(tmp_path, lora=LORA)
    claims = (ClaimCheck(text="t", holds=True, finding="f"),)
    budget = Reason(setting="max_usd", value="5", because="the prediction is $3, at most $4")
    made.plan = replace(made.plan, claims=claims, reasons=(*made.plan.reasons, budget))
    plan = made.changed(learning_rate=1.0)
    assert (plan.claims, plan.options) == ((), ())
    assert because(plan, but_not="")["max_usd"].startswith("not held: ")
    assert "no budget is held" in plan.cost.reason
    assert "loses at most" in because(made.plan, but_not="")["save_steps"]
    assert not any("loses at most" in r.because or "predicted 2" in r.because for r in plan.reasons)


def test_a_changed_share_of_the_work_is_explained_and_not_priced(tmp_path: Path) -> None:
    made = Made(tmp_path, price_usd_per_hour=2.0)
    assert made.changed(seed=5).cost.price_usd_per_hour == 2.0
    plan = made.changed(world_size=2)
    assert because(plan, but_not="")["parallel"].startswith("2 processes")
    assert plan.cost.price_usd_per_hour is None
    assert "for world_size 1" in plan.cost.reason


def test_a_cpu_trains_in_half_precision_only_where_asked_by_hand(made: Made) -> None:
    assert (made.plan.precision, made.plan.bf16) == ("fp32", False)
    plan = made.changed(bf16=True)
    assert (plan.precision, plan.bf16) == ("bf16", True)
    assert because(plan, but_not="given by hand")["precision"] == FOLLOWS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "qlora", "parallel": "fsdp", "world_size": 2}, "--parallel fsdp cannot share"),
        ({"min_delta": 0.1}, "--min-delta has no effect without patience"),
        ({"dataloader_num_workers": 2}, "--dataloader-num-workers 2 has no effect: the thread"),
        ({"use_tf32": True}, "--use-tf32 True has no effect: TF32 is a mode of CUDA cards"),
        ({"bf16": True, "fp16": True}, "--bf16 and fp16 are both true"),
        ({"lora_targets": ("q_proj", "lm_head")}, "--lora-targets names lm_head"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Made(tmp_path, lora=LORA).changed(**changes)
    assert "\n" not in str(caught.value)
    assert "training." not in str(caught.value)
