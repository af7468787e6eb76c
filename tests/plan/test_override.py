"""Hyper-parameters given by hand: what they change, and what follows from them."""

from dataclasses import fields
from pathlib import Path

import pytest
from support import LORA, write_tiny_run

from expertflow.core.errors import ConfigError
from expertflow.core.records import read_record
from expertflow.plan.override import LORA as LORA_FLAGS
from expertflow.plan.override import NOT_BY_HAND, flags, override
from expertflow.plan.records import PlanSpec, TrainPlan
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
