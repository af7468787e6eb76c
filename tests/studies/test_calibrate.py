"""A few real steps, and the analysis of their times."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import LORA, plan_spec, run_script, tiny_inputs

from expertflow.core.errors import HardwareError, TrainingError
from expertflow.core.records import read_record, to_json
from expertflow.hardware import gpu_table
from expertflow.plan.records import Calibration, TrainPlan
from expertflow.studies import calibrate as calibration
from expertflow.studies import plan_expert
from expertflow.studies.calibrate import shorten_plan, step_levels, take_times
from expertflow.studies.plan_expert import CalibrationJob
from expertflow.train.records import EvalPoint, SavePoint

pytestmark = pytest.mark.long


def calibrated(tiny: Path, folder: Path, **settings: Any) -> Calibration:
    spec = json.dumps(to_json(plan_spec(method="lora", lora=LORA, **settings)))
    words = ["--expert", "tiny", "--spec", spec, *tiny_inputs(tiny, "packing", "model")]
    words += ["--scratch", folder / ".calibration", "--output", folder / "calibration.json"]
    done = run_script("calibrate_expert", *words)
    assert done.returncode == 0, done.stderr
    # It leaves nothing else.
    assert {path.name for path in folder.iterdir()} == {
        "calibration.json", ".calibration.json.fingerprint",
    }  # fmt: skip
    return read_record(Calibration, folder / "calibration.json")


def test_a_calibration_times_thirty_steps_and_the_plan_goes_by_it(
    tiny: Path, tmp_path: Path
) -> None:
    # What a killed one left is no hindrance.
    (tmp_path / ".calibration" / "state").mkdir(parents=True)
    (tmp_path / ".calibration" / "plan.json").write_text("half a pl")
    made = calibrated(tiny, tmp_path, max_steps=60)
    assert (made.n_warmup_steps, made.n_timed_steps) == (10, 30)
    assert 0 < made.step_s_low <= made.step_s <= made.step_s_high
    assert made.save_s > 0 and made.eval_s > 0 and made.startup_s > 0
    assert made.n_timings == 30 and made.peak_memory_bytes is None
    assert made.key.startswith("cpu; 1 process; qwen3 of ")
    spec = plan_spec(method="lora", lora=LORA, max_steps=60, price_usd_per_hour=1.0)
    inputs = plan_expert.PlanInputs(
        expert="tiny", spec=spec, packing=tiny / "packing.json", model=tiny / "model.json"
    )
    planned = plan_expert.plan_expert(inputs, calibration=tmp_path / "calibration.json")
    assert planned.cost.calibrated
    assert planned.cost.step_hours == pytest.approx(60 * made.step_s / 3600)
    assert planned.cost.predicted_usd == pytest.approx(planned.cost.predicted_hours)


def test_two_processes_are_timed_by_the_first(tiny: Path, tmp_path: Path) -> None:
    made = calibrated(tiny, tmp_path, max_steps=12, world_size=2)
    assert (made.n_warmup_steps, made.n_timed_steps) == (3, 9)
    assert made.key.startswith("cpu; 2 x ddp; ")


def test_a_plan_is_shortened_and_nothing_else(base: TrainPlan) -> None:
    plan = replace(
        base, n_steps=200, n_warmup_steps=60, n_decay_steps=140, patience=2,
        load_best_model_at_end=True, save_steps=7, eval_steps=9,
    )  # fmt: skip
    short, n_warmup = shorten_plan(plan)
    assert (short.n_steps, n_warmup) == (40, 10)
    assert short.n_warmup_steps < short.n_steps
    assert short.n_warmup_steps + short.n_decay_steps <= short.n_steps
    assert short.save_steps == short.eval_steps == 40
    assert short.patience is None and not short.load_best_model_at_end
    assert n_warmup % short.logging_steps == 0


def test_short_epochs_are_timed_whole() -> None:
    uneven = np.array([2.0, 1.0] * 8)
    assert step_levels(uneven, per_epoch=2).tolist() == [1.5] * 8
    assert step_levels(uneven, per_epoch=5) is uneven
    assert step_levels(np.array([9.0, *uneven]), per_epoch=2).tolist() == [1.5] * 8


def test_the_parts_of_a_short_run_add_up_to_it(base: TrainPlan) -> None:
    """The rest happens once: here 4 s of startup and 1 s more for step 1."""
    seconds = np.array([2.0, *[1.0] * 7])
    record: Any = SimpleNamespace(
        time=SimpleNamespace(wall_s=3.0 + 4.0 + seconds.sum() + 2 * 0.5 + 0.25),
        save_points=(SavePoint(step=8, elapsed_s=13.0, save_s=0.25),),
        eval_points=(EvalPoint(step=8, loss=1.0, n_target_tokens=1, eval_s=0.5),) * 2,
        peak_memory_reserved_bytes=None,
    )
    steps: list[Any] = [
        SimpleNamespace(step_s=s, elapsed_s=5.0 + end, n_tokens=100)
        for s, end in zip(seconds, np.cumsum(seconds), strict=True)
    ]

    def timed(n_window_steps: int, steps: list[Any] = steps, **changes: int) -> Calibration:
        return take_times(
            replace(base, n_steps=8, **changes), record, steps, n_warmup=2, planning_s=3.0,
            key="k", n_window_steps=n_window_steps,
        )  # fmt: skip

    made = timed(1)
    assert made.n_timings == 6
    # On a card, every five steps share a time.
    assert timed(5).n_timings == timed(5, n_steps_per_epoch=1).n_timings == 2
    assert (made.step_s, made.step_s_low, made.step_s_high) == (1.0, 1.0, 1.0)
    assert (made.eval_s, made.save_s) == (0.5, 0.25)
    assert made.startup_s == pytest.approx(5.0)
    with pytest.raises(TrainingError, match="too few to time"):
        timed(1, steps=[])


def test_a_calibration_on_another_card_than_planned_is_refused(
    tiny: Path, tmp_path: Path, base: TrainPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"name": "H100 SXM", "driver_names": ["NVIDIA H100 80GB HBM3"], "source": "a test"}
    plan = replace(base, gpu=gpu_table.gpu_from_row(row))
    monkeypatch.setattr(calibration, "plan_expert", lambda *_, **__: plan)
    job = CalibrationJob(
        expert="tiny", spec=plan_spec(), packing=tiny / "packing.json", code="c",
        model=tiny / "model.json", rows=tiny / "packed", scratch=tmp_path / "s",
    )  # fmt: skip
    seen = SimpleNamespace(gpus=(SimpleNamespace(name="NVIDIA GeForce RTX 2060"),))
    monkeypatch.setattr(plan_expert, "probe_machine", lambda **_: seen)
    with pytest.raises(HardwareError, match=r"for H100 SXM and the card .* is NVIDIA GeForce"):
        calibration.calibrate(job)
    seen.gpus[0].name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(calibration, "run_job", lambda _: False)
    assert calibration.calibrate(job) is None
