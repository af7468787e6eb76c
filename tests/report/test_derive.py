"""Figures that follow from measurements, by hand."""

import pytest
from msgspec.structs import replace

from expertflow.report import derive
from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs


def test_mfu_by_hand(gpu_inputs: ReportInputs) -> None:
    # 86.4 M tokens in 2494.1 + 21.4 s, 2.62 GFLOP a token, of 989.5 TFLOP/s
    expected = 86.4e6 / 2_515.5 * 2.62e9 / 989.5e12
    assert derive.utilisation(gpu_inputs, 2.62e9).value == pytest.approx(expected)


def test_two_cards_have_twice_the_peak(gpu_inputs: ReportInputs) -> None:
    two = replace(gpu_inputs, training=replace(gpu_inputs.training, world_size=2))
    one = derive.utilisation(gpu_inputs, 2.62e9).value
    assert one is not None
    assert derive.utilisation(two, 2.62e9).value == pytest.approx(one / 2)


def test_another_card_than_planned_has_no_peak(gpu_inputs: ReportInputs) -> None:
    other = replace(gpu_inputs.training, gpu_name="NVIDIA L40S")
    peak = derive.peak(gpu_inputs.plan, other)
    assert peak.flops_per_s is None
    assert peak.reason is not None and "NVIDIA L40S" in peak.reason


def test_peak_follows_precision(gpu_inputs: ReportInputs) -> None:
    plan, training = gpu_inputs.plan, replace(gpu_inputs.training, precision="fp32")
    assert derive.peak(plan, training).flops_per_s == 494.5e12
    assert derive.peak(replace(plan, use_tf32=False), training).flops_per_s is None


def test_unknown_peak_takes_the_measured_one(gpu_inputs: ReportInputs) -> None:
    training = replace(
        gpu_inputs.training, gpu_name="NVIDIA L40S", measured_peak_flops_per_s=331e12
    )
    peak = derive.peak(gpu_inputs.plan, training)
    assert (peak.flops_per_s, peak.source) == (331e12, "measured matmul on this card")
    assert peak.reason is None


def test_published_peak_wins_and_names_the_source_of_this_very_figure(
    gpu_inputs: ReportInputs,
) -> None:
    training = replace(gpu_inputs.training, measured_peak_flops_per_s=700e12)
    bf16 = derive.peak(gpu_inputs.plan, training)
    assert (bf16.flops_per_s, bf16.source) == (989.5e12, "NVIDIA datasheet, dense")
    fp16 = derive.peak(gpu_inputs.plan, replace(training, precision="fp16"))
    assert fp16.source == "NVIDIA H100 datasheet"


def test_cpu_has_no_peak_even_if_one_was_measured(cpu_inputs: ReportInputs) -> None:
    training = replace(cpu_inputs.training, measured_peak_flops_per_s=1e11)
    assert derive.peak(cpu_inputs.plan, training).flops_per_s is None


@pytest.mark.parametrize(
    ("reserved", "spilled"), [(62.3e9, 0), (62.2e9, 0), (70.3e9, 8_000_000_000)]
)
def test_spilled_is_what_the_card_never_held(
    reserved: float, spilled: int, gpu_inputs: ReportInputs
) -> None:
    training = replace(gpu_inputs.training, peak_memory_reserved_bytes=int(reserved))
    assert derive.memory_spilled(replace(gpu_inputs, training=training)).value == spilled


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
    spilled = derive.memory_spilled(inputs)
    assert spilled.value is None and spilled.reason


def test_energy_of_several_cards_is_that_of_all(gpu_inputs: ReportInputs) -> None:
    two = replace(
        gpu_inputs,
        training=replace(gpu_inputs.training, world_size=2),
        monitor=replace(gpu_inputs.monitor, energy_j=1.8e6, energy_all_j=3.6e6),
    )
    assert derive.energy_kwh(two).value == pytest.approx(1.0)


def test_billing_steps_round_up_what_stands_beside_the_plan(gpu_inputs: ReportInputs) -> None:
    cost = replace(gpu_inputs.plan.cost, billing_minutes=60.0)
    inputs = replace(gpu_inputs, plan=replace(gpu_inputs.plan, cost=cost))
    assert derive.billed_usd(inputs).value == pytest.approx(2.49)
    row = next(r for r in build_report(inputs, {})["plan_against_actual"] if r["unit"] == "usd")
    assert row["actual"] == pytest.approx(2.49)
    assert derive.cost_usd(inputs).value == pytest.approx(2.49 * 2_712 / 3600)


@pytest.mark.parametrize(
    ("n_epochs", "started"), [(0.2, 1), (1.0, 1), (1.0000000001, 1), (1.01, 2), (3.0, 3)]
)
def test_epochs_started(n_epochs: float, started: int) -> None:
    assert derive.n_epochs_started(n_epochs) == started
