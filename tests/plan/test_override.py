"""Settings set by hand or found by a search: where they take precedence, and what follows."""

from typing import Any

import pytest
from msgspec.structs import replace
from plan_fixtures import N_PARAMS, PACKING, QWEN_06B, because_of, card, plan, reasons_of, seq
from plan_fixtures import plan as plan_for
from support import LORA

from expertflow.core.errors import ConfigError, HardwareError
from expertflow.plan import tuned
from expertflow.plan.override import FOLLOWS, override
from expertflow.plan.records import ClaimCheck, Reason, TrainPlan
from expertflow.plan.settings import LoraSpec

FULL: dict[str, Any] = {
    "method": "full", "lora": None, "batch_size": 4, "gradient_accumulation_steps": 1,
    "max_steps": 40,
}  # fmt: skip
MADE = plan_for(None, **FULL)
ADAPTED = plan_for(None, **{**FULL, "method": "lora", "lora": LORA})


def changed(made: TrainPlan, **changes: object) -> TrainPlan:
    return override(made, changes, packing=PACKING, facts=QWEN_06B)


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


def test_steps_and_epochs_are_used_as_given() -> None:
    assert changed(MADE, max_steps=7).n_steps == 7
    two = changed(MADE, num_train_epochs=2.0)
    assert two.n_steps == 2 * two.n_steps_per_epoch
    assert changed(MADE, max_steps=7, warmup_ratio=0.5).n_warmup_steps == 4
    with pytest.raises(ConfigError, match="--warmup-steps-min 9 is not below max_steps 7"):
        changed(MADE, max_steps=7, warmup_steps_min=9, override_min_warmup=False)


def test_an_adapter_is_changed_or_removed() -> None:
    plan = changed(ADAPTED, lora_r=2)
    assert plan.lora is not None and plan.lora.r == 2
    assert plan.n_params_trainable == ADAPTED.n_params_trainable // 2
    full = changed(ADAPTED, method="full")
    assert full.lora is None
    assert full.n_params_trainable == full.n_params_total == N_PARAMS
    with pytest.raises(ConfigError, match="drop --lora-r"):
        changed(ADAPTED, method="full", lora_r=4)
    # Unset values are as in a manifest that does not set them.
    assert changed(MADE, method="lora", lora_r=4).lora == LoraSpec(r=4)


def test_predictions_of_the_old_plan_are_not_kept() -> None:
    claims = (ClaimCheck(text="t", holds=True, finding="f"),)
    budget = Reason(setting="max_usd", value="5", because="the prediction is $3, at most $4")
    made = replace(ADAPTED, claims=claims, reasons=(*ADAPTED.reasons, budget))
    plan = changed(made, learning_rate=3e-6)
    assert (plan.learning_rate, plan.n_steps) == (3e-6, made.n_steps)
    reason = reasons_of(plan)["learning_rate"]
    assert (reason.value, reason.because) == ("3e-06", "set by hand")
    assert (plan.claims, plan.options, plan.predicted_peak_bytes) == ((), (), None)
    assert because_of(plan)["max_usd"].startswith("not enforced: ")
    assert "no budget is enforced" in plan.cost.reason
    assert "loses at most" in because_of(made)["save_steps"]
    assert not any("loses at most" in r.because or "predicted 2" in r.because for r in plan.reasons)


def test_a_longer_run_keeps_the_saves_of_the_manifest() -> None:
    for given, longer in ((MADE.n_steps, MADE.n_steps), (None, 2 * MADE.n_steps)):
        made = plan_for(None, **FULL, save_steps=given)
        assert made.save_steps == made.n_steps
        assert changed(made, max_steps=2 * MADE.n_steps).save_steps == longer


def test_a_changed_share_of_the_work_is_explained_and_not_priced() -> None:
    made = plan_for(None, **FULL, price_usd_per_hour=2.0)
    assert changed(made, seed=5).cost.price_usd_per_hour == 2.0
    plan = changed(made, world_size=2)
    assert because_of(plan)["parallel"].startswith("2 processes")
    assert plan.cost.price_usd_per_hour is None
    assert "for world_size 1" in plan.cost.reason


def test_a_cpu_trains_in_half_precision_only_if_set_by_hand() -> None:
    assert (MADE.precision, MADE.bf16) == ("fp32", False)
    plan = changed(MADE, bf16=True)
    assert (plan.precision, plan.bf16) == ("bf16", True)
    assert because_of(plan)["precision"] == FOLLOWS


def test_contradictions() -> None:
    sharded = {"method": "qlora", "parallel": "fsdp", "world_size": 2}
    for changes, message in (
        (sharded, "--parallel fsdp cannot shard"),
        ({"min_delta": 0.1}, "--min-delta has no effect without patience"),
        ({"dataloader_num_workers": 2}, "--dataloader-num-workers 2 has no effect: the thread"),
        ({"use_tf32": True}, "--use-tf32 True has no effect: TF32 is a mode of CUDA cards"),
        ({"bf16": True, "fp16": True}, "--bf16 and fp16 are both true"),
        ({"lora_targets": ("q_proj", "lm_head")}, "--lora-targets includes lm_head"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            changed(ADAPTED, **changes)
        assert "\n" not in str(caught.value) and "training." not in str(caught.value)


FILE = "results/e/tuning.json"
H100 = card("H100 SXM")


def tuned_plan(record: tuned.TuningRecord | None = None, **changes: Any) -> TrainPlan:
    """Plan for a card, by default an H100, with a search's results."""
    cpu, gpu = changes.pop("cpu", None), changes.pop("gpu", H100)
    tuning = None if record is None else tuned.Tuning(record=record, cpu=cpu, trace=lambda _: None)
    return plan(gpu, tuning=tuning, **{"n_threads": None, "tuned": FILE, **changes})


DEFAULT = tuned.settings_of(tuned_plan())
BEST = replace(
    DEFAULT, batch_size=DEFAULT.batch_size // 2,
    gradient_accumulation_steps=DEFAULT.gradient_accumulation_steps * 2,
    attention="flex", torch_compile=False,
)  # fmt: skip


def trial(settings: tuned.TunedSettings, speed: float) -> tuned.TuningTrial:
    return tuned.TuningTrial(
        settings=settings, outcome="measured", tokens_per_s=speed, n_timed_steps=5
    )


def record(**changes: Any) -> tuned.TuningRecord:
    settings: dict[str, Any] = {
        "expert": "e", "key": key_of(tuned_plan()), "hardware": "H100 SXM",
        "gpu_name": "NVIDIA H100 80GB HBM3", "best": BEST, "default": DEFAULT,
        "gain": 1.31, "gain_low": 1.28, "gain_high": 1.34,
        "trials": (trial(DEFAULT, 1000), trial(BEST, 1300)),
    }  # fmt: skip
    return tuned.TuningRecord(**{**settings, **changes})


def key_of(made: TrainPlan, cpu: str | None = None) -> str:
    return tuned.tuning_key(made, model_type="qwen3", packing=PACKING.packing, cpu=cpu)


def test_the_best_is_used_and_every_setting_says_so() -> None:
    made = tuned_plan(record())
    assert tuned.settings_of(made) == BEST
    assert made.global_batch_sequences == tuned_plan().global_batch_sequences
    assert made.may_halve_micro_batch
    told = because_of(made)
    because = "tuned: fastest of 2 on NVIDIA H100 80GB HBM3, 1.31 times the default [1.28, 1.34]"
    settings = ("gradient_accumulation_steps", "attention", "torch_compile", "n_threads", "loader")
    assert {told[setting] for setting in settings} == {because}
    assert told["batch_size"].startswith(f"{because}; predicted ")
    assert told["tuned"] == "applies where the manifest leaves a setting open"
    values = reasons_of(made)
    assert values["tuned"].value == FILE and values["attention"].value == "flex"


def test_a_tuning_predicted_not_to_fit_is_rejected() -> None:
    small: dict[str, Any] = {"gpu": card("RTX 2060"), "packing": seq(512)}
    before = tuned_plan(**small)
    rows = before.global_batch_sequences
    greedy = replace(
        tuned.settings_of(before), batch_size=rows, gradient_accumulation_steps=1,
        gradient_checkpointing=False,
    )  # fmt: skip
    found = record(key=key_of(before), best=greedy, default=tuned.settings_of(before))
    with pytest.raises(HardwareError, match="GiB but RTX 2060 has"):
        tuned_plan(found, **small)


@pytest.mark.parametrize(("setting", "value"), [("torch_compile", True), ("attention", "sdpa")])
def test_the_manifests_settings_take_precedence(setting: str, value: Any) -> None:
    default = tuned.settings_of(tuned_plan(**{setting: value}))
    other = replace(default, batch_size=4, gradient_accumulation_steps=4)
    trials = (trial(DEFAULT, 1000), trial(default, 1000), trial(BEST, 1300), trial(other, 1100))
    made = tuned_plan(record(trials=trials), **{setting: value})
    assert tuned.settings_of(made) == other
    told = because_of(made)
    assert reasons_of(made)[setting].value == str(value)
    assert "from the manifest; wins over tuning, whose fastest trial had " in told[setting]
    assert "and 1.30 times the default's speed" in told[setting]
    words = "tuned: fastest that agrees with the manifest of 4 on NVIDIA H100 80GB HBM3"
    assert told["gradient_accumulation_steps"].startswith(words)


def test_a_search_of_another_run_is_ignored() -> None:
    for changes, says in (
        ({"gpu": card("RTX 4090")}, "H100 SXM, not RTX 4090"),
        ({"packing": seq(1024)}, "rows of 2048 tokens, not"),
        ({"method": "full", "lora": None}, "parameters, not qwen3 of"),
        ({"batch_size": 4, "gradient_accumulation_steps": 1}, "16 rows a step, not 4"),
        ({"lora": replace(LORA, dropout=0.25)}, "dropout 0.25 on"),
        ({"lora": replace(LORA, targets=("k_proj", "q_proj"))}, "on k_proj"),
        ({"label_smoothing_factor": 0.1}, "label smoothing 0, not label smoothing 0.1"),
        ({"bf16": False, "fp16": True}, "bf16 with TF32, not fp16 with TF32"),
        ({"torch_compile_mode": "reduce-overhead"}, "not any kernels, compiled for reduce-"),
    ):
        made = tuned_plan(record(), **changes)
        assert tuned.settings_of(made) == tuned.settings_of(tuned_plan(**changes))
        because = because_of(made)["tuned"]
        assert because.startswith("ignored: it was tuned for another run (") and says in because


def test_a_search_on_another_processor_is_ignored() -> None:
    before = tuned_plan(gpu=None)
    default, key = tuned.settings_of(before), key_of(before, "AMD; 2")
    best = replace(default, n_threads=1)
    found = record(key=key, hardware="cpu", gpu_name=None, default=default, best=best)
    assert tuned_plan(found, gpu=None, cpu="AMD; 2").n_threads == 1
    other = tuned_plan(found, gpu=None, cpu="Intel")
    assert other.n_threads is None
    assert "(cpu AMD, 2, not cpu Intel)" in because_of(other)["tuned"]


def test_a_default_that_none_beats_stays_with_its_reason() -> None:
    made = tuned_plan(record(best=DEFAULT, gain=1.0, gain_low=None, gain_high=None))
    assert tuned.settings_of(made) == DEFAULT
    because = because_of(made)["attention"]
    assert because.startswith("tuned: the default, which no trial measurably beat by 2 %, of 2 on")
