"""Figures that follow from measurements, by hand."""

from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.report import derive
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Missing
from expertflow.train.records import MemoryRetry, SampledSteps

Report = dict[str, Any]


def test_mfu_by_hand(gpu_inputs: ReportInputs) -> None:
    # 86.4 M tokens in 2494.1 + 21.4 s, 2.62 GFLOP a token, of 989.5 TFLOP/s
    expected = 86.4e6 / 2_515.5 * 2.62e9 / 989.5e12
    assert derive.utilisation(gpu_inputs, 2.62e9) == pytest.approx(expected)


def test_two_cards_have_twice_the_peak(gpu_inputs: ReportInputs) -> None:
    two = replace(gpu_inputs, training=replace(gpu_inputs.training, world_size=2))
    one = derive.utilisation(gpu_inputs, 2.62e9)
    assert isinstance(one, float)
    assert derive.utilisation(two, 2.62e9) == pytest.approx(one / 2)


def test_another_card_than_planned_has_no_peak(gpu_inputs: ReportInputs) -> None:
    other = replace(gpu_inputs.training, gpu_name="NVIDIA L40S")
    peak = derive.peak(gpu_inputs.plan, other)
    assert isinstance(peak, Missing) and "NVIDIA L40S" in peak.reason


def test_peak_follows_precision(gpu_inputs: ReportInputs) -> None:
    plan, training = gpu_inputs.plan, replace(gpu_inputs.training, precision="fp32")
    peak = derive.peak(plan, training)
    assert isinstance(peak, derive.Peak) and peak.flops_per_s == 494.5e12
    assert isinstance(derive.peak(replace(plan, use_tf32=False), training), Missing)


def test_unknown_peak_takes_the_measured_one(gpu_inputs: ReportInputs) -> None:
    training = replace(
        gpu_inputs.training, gpu_name="NVIDIA L40S", measured_peak_flops_per_s=331e12
    )
    peak = derive.peak(gpu_inputs.plan, training)
    assert peak == derive.Peak(flops_per_s=331e12, source="measured matmul on this card")


def test_published_peak_wins_and_names_the_source_of_this_very_figure(
    gpu_inputs: ReportInputs,
) -> None:
    training = replace(gpu_inputs.training, measured_peak_flops_per_s=700e12)
    bf16 = derive.peak(gpu_inputs.plan, training)
    assert bf16 == derive.Peak(flops_per_s=989.5e12, source="NVIDIA datasheet, dense")
    fp16 = derive.peak(gpu_inputs.plan, replace(training, precision="fp16"))
    assert isinstance(fp16, derive.Peak) and fp16.source == "NVIDIA H100 datasheet"


def test_cpu_has_no_peak_even_if_one_was_measured(cpu_inputs: ReportInputs) -> None:
    training = replace(cpu_inputs.training, measured_peak_flops_per_s=1e11)
    assert isinstance(derive.peak(cpu_inputs.plan, training), Missing)


@pytest.mark.parametrize(
    ("reserved", "spilled"), [(62.3e9, 0), (62.2e9, 0), (70.3e9, 8_000_000_000)]
)
def test_spilled_is_what_the_card_never_held(
    reserved: float, spilled: int, gpu_inputs: ReportInputs
) -> None:
    training = replace(gpu_inputs.training, peak_memory_reserved_bytes=int(reserved))
    assert derive.memory_spilled(replace(gpu_inputs, training=training)) == spilled


@pytest.mark.parametrize("missing", ["cpu", "reserved", "used"])
def test_spill_is_unknown_without_both_readings(
    missing: str, gpu_inputs: ReportInputs, cpu_inputs: ReportInputs
) -> None:
    inputs = {
        "cpu": cpu_inputs,
        "reserved": replace(
            gpu_inputs, training=replace(gpu_inputs.training, peak_memory_reserved_bytes=None)
        ),
        "used": replace(gpu_inputs, monitor=replace(gpu_inputs.monitor, memory_used_bytes=None)),
    }[missing]
    assert isinstance(derive.memory_spilled(inputs), Missing)


def test_energy_of_several_cards_is_that_of_all(gpu_inputs: ReportInputs) -> None:
    two = replace(
        gpu_inputs,
        training=replace(gpu_inputs.training, world_size=2),
        monitor=replace(gpu_inputs.monitor, energy_j=1.8e6, energy_all_j=3.6e6),
    )
    assert derive.energy_kwh(two) == pytest.approx(1.0)


def test_billing_steps_round_up_what_stands_beside_the_plan(gpu_inputs: ReportInputs) -> None:
    cost = replace(gpu_inputs.plan.cost, billing_minutes=60.0)
    inputs = replace(gpu_inputs, plan=replace(gpu_inputs.plan, cost=cost))
    assert derive.cost_usd(inputs, billed=True) == pytest.approx(2.49)
    row = next(r for r in build_report(inputs, {})["plan_against_actual"] if r["unit"] == "usd")
    assert row["actual"] == pytest.approx(2.49)
    assert derive.cost_usd(inputs) == pytest.approx(2.49 * 2_712 / 3600)


@pytest.mark.parametrize(
    ("n_epochs", "started"), [(0.2, 1), (1.0, 1), (1.0000000001, 1), (1.01, 2), (3.0, 3)]
)
def test_epochs_started(n_epochs: float, started: int) -> None:
    assert derive.n_epochs_started(n_epochs) == started


def test_gpu_steps_are_split_by_their_samples(gpu_inputs: ReportInputs) -> None:
    sampled = SampledSteps(n_steps=9, h2d_s=0.1, forward_s=0.3, backward_s=0.5, optimizer_s=0.1)
    time = derive.split_time(replace(gpu_inputs.training, sampled_steps=sampled)).spent
    whole_s = gpu_inputs.training.time.train_s
    assert time.h2d_s == pytest.approx(0.1 * whole_s)
    assert time.train_s == pytest.approx(0.9 * whole_s)
    assert time.forward_s == pytest.approx(0.3 * whole_s)
    assert time.backward_s == pytest.approx(0.5 * whole_s)
    assert time.optimizer_s == pytest.approx(0.1 * whole_s)


def test_idle_time_is_an_estimate_and_says_so(gpu_inputs: ReportInputs) -> None:
    training = replace(gpu_inputs.training, n_sessions=1)
    section = build_report(replace(gpu_inputs, training=training), {})["time"]
    # 2,712 s, less 75.6 s of evaluation and 1,800 steps of 1.383 s
    assert section["gpu_idle_s"] == pytest.approx(2_712 - 75.6 - 1_800 * 1.383)
    assert section["split_source"] == "sampled steps"
    assert section["gpu_idle_source"].startswith("estimate: ")


def test_busier_than_the_wall_is_not_idle(gpu_inputs: ReportInputs) -> None:
    sampled = replace(gpu_inputs.training.sampled_steps, backward_s=9.0)  # type: ignore[type-var]
    times = derive.split_time(replace(gpu_inputs.training, sampled_steps=sampled, n_sessions=1))
    assert times.spent.gpu_idle_s == 0.0


RETRY = MemoryRetry(after_step=0, micro_batch_size=8, n_accumulation_steps=4, message="short")


@pytest.mark.parametrize("broken", [{"n_sessions": 2}, {"memory_retries": (RETRY,)}])
def test_work_that_was_thrown_away_is_not_idle(
    broken: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    training = replace(gpu_inputs.training, **{"n_sessions": 1, **broken})
    report = build_report(replace(gpu_inputs, training=training), {})
    section, reasons = report["time"], report["unavailable"]
    assert section["split_source"] == "sampled steps"
    assert section["gpu_idle_s"] is None and section["gpu_idle_source"] is None
    assert reasons["time.gpu_idle_s"] == "work that was thrown away is not timed"


NO_TIME = SampledSteps(n_steps=1, h2d_s=0.0, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)


@pytest.mark.parametrize("sampled", [None, NO_TIME])
def test_without_samples_nothing_is_split(
    sampled: SampledSteps | None, gpu_inputs: ReportInputs
) -> None:
    training = replace(gpu_inputs.training, sampled_steps=sampled)
    times = derive.split_time(training)
    assert times.spent == training.time
    assert isinstance(times.split_source, Missing)
    assert isinstance(times.gpu_idle_source, Missing)


def _rows(report: Report) -> dict[str, Report]:
    return {row["quantity"]: row for row in report["plan_against_actual"]}


def test_rows_repeat_plan_and_run(gpu_report: Report) -> None:
    rows = _rows(gpu_report)
    assert list(rows) == [
        "Optimiser steps", "Useful tokens", "Useful tokens a second", "Wall time", "Cost",
        "Peak device memory",
    ]  # fmt: skip
    assert rows["Wall time"]["difference_fraction"] == pytest.approx(2_712 / 3_600 / 0.73 - 1)
    assert (rows["Cost"]["plan_low"], rows["Cost"]["plan_high"]) == (1.7679, 1.9173)
    assert rows["Peak device memory"]["actual"] == 61_500_000_000


def test_speed_band_is_that_of_the_steps(gpu_report: Report) -> None:
    speed = _rows(gpu_report)["Useful tokens a second"]
    # 86.4 M tokens; 0.675 h of stepping in 0.73 h, which may be 0.71 to 0.77 h
    assert speed["plan"] == pytest.approx(86.4e6 / 0.675 / 3_600)
    assert speed["plan_low"] == pytest.approx(86.4e6 / (0.675 + 0.04) / 3_600)
    assert speed["plan_high"] == pytest.approx(86.4e6 / (0.675 - 0.02) / 3_600)


def test_nothing_is_compared_with_nothing(cpu_report: Report) -> None:
    rows, reasons = _rows(cpu_report), cpu_report["unavailable"]
    assert rows["Optimiser steps"]["difference_fraction"] == 0
    for index, name in enumerate(rows):
        if rows[name]["difference_fraction"] is None:
            assert reasons[f"plan_against_actual[{index}].difference_fraction"]
    assert rows["Wall time"]["plan"] is None
    assert reasons["plan_against_actual[3].plan"] == reasons["plan.hours"]
    memory = "training_report.hardware.memory_peak_reserved_bytes"
    assert reasons["plan_against_actual[5].actual"] == reasons[memory]


def test_uncalibrated_plan_passes_with_reasons(gpu_inputs: ReportInputs) -> None:
    prior = replace(
        gpu_inputs.plan.cost,
        calibrated=False, step_hours=0.73, save_hours=None, eval_hours=None, startup_hours=None,
    )  # fmt: skip
    inputs = replace(gpu_inputs, plan=replace(gpu_inputs.plan, cost=prior))
    report = build_report(inputs, {})
    check_report(report, inputs)
    assert "not calibrated" in report["unavailable"]["plan.save_hours"]
