"""A plan that takes over what a search found: where it may, and what its reasons say."""

from typing import Any

import pytest
from msgspec.structs import replace
from plan_fixtures import PACKING, because_of, card, plan, reasons_of, seq
from support import LORA

from expertflow.core.errors import HardwareError
from expertflow.plan import tuned
from expertflow.plan.records import TrainPlan

FILE = "results/e/tuning.json"
H100 = card("H100 SXM")


def tuned_plan(record: tuned.TuningRecord | None = None, **changes: Any) -> TrainPlan:
    """Plan for a card, an H100 unless another is given, by what a search found."""
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
        "gpu_name": "NVIDIA H100 80GB HBM3", "model": "qwen3", "sequence_length_tokens": 2048,
        "global_batch_sequences": 16, "best": BEST, "default": DEFAULT,
        "default_tokens_per_s": 1000.0, "best_tokens_per_s": 1310.0, "gain": 1.31,
        "gain_low": 1.28, "gain_high": 1.34, "trials": (trial(DEFAULT, 1000), trial(BEST, 1300)),
        "search_s": 100.0, "was_cached": False,
    }  # fmt: skip
    return tuned.TuningRecord(**{**settings, **changes})


def key_of(made: TrainPlan, cpu: str | None = None) -> str:
    return tuned.tuning_key(made, model_type="qwen3", packing=PACKING.packing, cpu=cpu)


def test_the_best_is_taken_and_every_setting_says_so() -> None:
    made = tuned_plan(record())
    assert tuned.settings_of(made) == BEST
    assert made.global_batch_sequences == tuned_plan().global_batch_sequences
    assert made.may_halve_micro_batch
    told = because_of(made)
    because = "tuned: fastest of 2 on NVIDIA H100 80GB HBM3, 1.31 times the default [1.28, 1.34]"
    settings = ("gradient_accumulation_steps", "attention", "torch_compile", "n_threads", "loader")
    assert {told[setting] for setting in settings} == {because}
    assert told["batch_size"].startswith(f"{because}; predicted ")
    assert told["tuned"] == "counts where the manifest leaves a setting open"
    values = reasons_of(made)
    assert values["tuned"].value == FILE and values["attention"].value == "flex"


def test_what_is_predicted_not_to_fit_is_refused() -> None:
    small: dict[str, Any] = {"gpu": card("RTX 2060"), "packing": seq(512)}
    before = tuned_plan(**small)
    rows = before.global_batch_sequences
    greedy = replace(
        tuned.settings_of(before), batch_size=rows, gradient_accumulation_steps=1,
        gradient_checkpointing=False,
    )  # fmt: skip
    found = record(key=key_of(before), best=greedy, default=tuned.settings_of(before))
    with pytest.raises(HardwareError, match="GiB and RTX 2060 has"):
        tuned_plan(found, **small)


@pytest.mark.parametrize(("setting", "value"), [("torch_compile", True), ("attention", "sdpa")])
def test_what_a_manifest_names_wins(setting: str, value: Any) -> None:
    default = tuned.settings_of(tuned_plan(**{setting: value}))
    other = replace(default, batch_size=4, gradient_accumulation_steps=4)
    trials = (trial(DEFAULT, 1000), trial(default, 1000), trial(BEST, 1300), trial(other, 1100))
    made = tuned_plan(record(trials=trials), **{setting: value})
    assert tuned.settings_of(made) == other
    told = because_of(made)
    assert reasons_of(made)[setting].value == str(value)
    assert "of the manifest; wins over tuning, whose fastest trial had " in told[setting]
    assert "and 1.30 times the default's speed" in told[setting]
    words = "tuned: fastest that agrees with the manifest of 4 on NVIDIA H100 80GB HBM3"
    assert told["gradient_accumulation_steps"].startswith(words)


def test_a_search_of_another_run_is_left_out() -> None:
    changes: dict[str, Any]
    for changes, says in (
        ({"gpu": card("RTX 4090")}, "H100 SXM, not RTX 4090"),
        ({"packing": seq(1024)}, "rows of 2048 tokens, not"),
        ({"method": "full", "lora": None}, "parameters, not qwen3 of"),
        ({"batch_size": 4, "gradient_accumulation_steps": 1}, "16 rows a step, not 4"),
        ({"lora": replace(LORA, dropout=0.25)}, "dropout 0.25 on"),
        ({"lora": replace(LORA, targets=("k_proj", "q_proj"))}, "on k_proj"),
        ({"label_smoothing_factor": 0.1}, "label smoothing 0, not label smoothing 0.1"),
        ({"bf16": False, "fp16": True}, "bf16 with TF32, not fp16 with TF32"),
    ):
        made = tuned_plan(record(), **changes)
        assert tuned.settings_of(made) == tuned.settings_of(tuned_plan(**changes))
        because = because_of(made)["tuned"]
        assert because.startswith("left out: it was tuned for another run (") and says in because


def test_a_search_on_another_processor_is_left_out() -> None:
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
    assert because.startswith("tuned: the default, which none was faster than by 2 %, of 2 on")
