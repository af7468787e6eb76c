"""Hyper-parameters given by hand: what they change, and what follows from them."""

from pathlib import Path

import pytest
from msgspec.structs import fields, replace
from support import LORA, write_tiny_run

from expertflow.core.errors import ConfigError
from expertflow.core.records import read_record
from expertflow.plan.cost_records import ClaimCheck
from expertflow.plan.override import LORA as LORA_FLAGS
from expertflow.plan.override import NOT_BY_HAND, QUOTING, TAKEN_OVER, flags, override
from expertflow.plan.records import PlanSpec, Reason, TrainPlan
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import ModelRecord

FOLLOWS = "follows from what was given by hand"


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


def test_every_setting_is_a_flag_or_is_left_out_by_name() -> None:
    settings = {field.name for field in fields(PlanSpec)}
    assert settings >= NOT_BY_HAND
    assert set(flags()) >= settings - NOT_BY_HAND
    assert {"num_train_epochs", "precision", "warmup_steps", "lora_r"} <= set(flags())
    assert set(LORA_FLAGS) <= set(flags())


def test_nothing_given_changes_nothing(made: Made) -> None:
    assert made.changed() is made.plan


def test_a_plain_setting_is_taken_over_and_explained(made: Made) -> None:
    plan = made.changed(learning_rate=3e-6)
    assert plan.learning_rate == 3e-6
    assert plan.n_steps == made.plan.n_steps
    [reason] = [r for r in plan.reasons if r.setting == "learning_rate"]
    assert (reason.value, reason.because) == ("3e-06", "given by hand")
    assert plan.predicted_peak_bytes is None
    assert plan.cost.predicted_usd is None


def test_a_larger_batch_makes_fewer_steps_of_as_many_epochs(made: Made) -> None:
    old = made.plan
    plan = made.changed(batch_size=8)
    assert plan.global_batch_sequences == 2 * old.global_batch_sequences
    assert plan.n_steps_per_epoch == -(-old.n_sequences // plan.global_batch_sequences)
    assert plan.n_steps == pytest.approx(old.n_epochs * plan.n_steps_per_epoch, abs=1)
    assert plan.n_warmup_steps == int(old.n_warmup_steps * plan.n_steps / old.n_steps)
    assert not plan.may_halve_micro_batch
    assert plan.eval_steps == plan.n_steps_per_epoch


def test_steps_and_epochs_are_taken_at_their_word(made: Made) -> None:
    assert made.changed(max_steps=7).n_steps == 7
    two = made.changed(num_train_epochs=2.0)
    assert two.n_steps == 2 * two.n_steps_per_epoch
    with pytest.raises(ConfigError, match="warm-up of 9 steps is not below the 7 steps"):
        made.changed(max_steps=7, warmup_steps=9)


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


def test_the_loader_is_changed(made: Made) -> None:
    plan = made.changed(loader="workers", dataloader_num_workers=2)
    assert (plan.loader.kind, plan.loader.n_workers) == ("workers", 2)
    assert {"n_loader_workers", "loader"}.isdisjoint(because(plan, but_not="given by hand"))


def because(plan: TrainPlan, *, but_not: str) -> dict[str, str]:
    return {r.setting: r.because for r in plan.reasons if r.because != but_not}


def test_workers_of_the_plan_go_with_their_loader(tmp_path: Path) -> None:
    made = Made(
        tmp_path, loader="workers", dataloader_num_workers=2, dataloader_persistent_workers=True
    )
    plan = made.changed(loader="thread")
    assert (plan.loader.n_workers, plan.loader.persistent_workers) == (0, False)
    assert because(plan, but_not="")["n_loader_workers"] == FOLLOWS


def test_what_follows_has_a_reason_of_its_own(made: Made) -> None:
    plan = made.changed(batch_size=8)
    stated = {r.setting: (r.value, r.because) for r in plan.reasons}
    assert stated["n_steps"] == (str(plan.n_steps), FOLLOWS)
    assert stated["n_warmup_steps"] == (str(plan.n_warmup_steps), FOLLOWS)
    assert stated["precision"][1] != FOLLOWS
    kept = because(made.changed(learning_rate=1.0), but_not="given by hand")
    before = because(made.plan, but_not="")
    assert kept == {**before, **dict.fromkeys(QUOTING, TAKEN_OVER)}


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


def test_decay_ends_where_warm_up_does(tmp_path: Path) -> None:
    made = Made(tmp_path, lr_decay_ratio=1.0)
    plan = made.changed(warmup_steps=30)
    assert (plan.n_steps, plan.n_decay_steps) == (40, 10)
    with pytest.raises(ConfigError, match="--lr-decay-steps 11: warm-up leaves 10 of the 40"):
        made.changed(warmup_steps=30, lr_decay_steps=11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "qlora", "parallel": "fsdp", "world_size": 2}, "--parallel fsdp cannot share"),
        (
            {"optim": "adamw_8bit", "parallel": "fsdp", "world_size": 2},
            "states of optim adamw_8bit",
        ),
        ({"min_delta": 0.1}, r"--min-delta 0\.1 has no effect without patience"),
        ({"dataloader_num_workers": 2}, "--dataloader-num-workers 2: the loader is the thread"),
        ({"dataloader_persistent_workers": True}, "there are no workers to keep"),
        ({"lora_targets": ("q_proj", "lm_head")}, "--lora-targets names lm_head"),
    ],
)
def test_contradictions_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Made(tmp_path, lora=LORA).changed(**changes)
    assert "\n" not in str(caught.value)
    assert "training." not in str(caught.value)


def test_a_loader_that_held_nothing_needs_to_be_told_how_much(tmp_path: Path) -> None:
    made = Made(tmp_path, loader="workers")
    with pytest.raises(ConfigError, match="give --dataloader-prefetch-factor"):
        made.changed(loader="thread")
    assert made.changed(loader="thread", dataloader_prefetch_factor=3).loader.n_prefetch_batches
