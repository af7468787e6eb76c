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


def test_mfu_by_hand(gpu_inputs: ReportInputs) -> None:
    # 86.4 M tokens in 2494.1 + 21.4 s, 2.62 GFLOP a token, of 989.5 TFLOP/s
    expected = 86.4e6 / 2_515.5 * 2.62e9 / 989.5e12
    assert derive.utilization(gpu_inputs, 2.62e9) == pytest.approx(expected)
    two = replace(gpu_inputs, training=replace(gpu_inputs.training, world_size=2))
    assert derive.utilization(two, 2.62e9) == pytest.approx(expected / 2)
    time = replace(gpu_inputs.training.time, h2d_s=100.0)
    copied = replace(gpu_inputs, training=replace(gpu_inputs.training, time=time))
    slower = expected * 2_515.5 / 2_615.5
    assert derive.utilization(copied, 2.62e9) == pytest.approx(slower)


OTHER = {"gpu_name": "NVIDIA L40S"}
MEASURED = "measured matmul on this card"


@pytest.mark.parametrize(
    ("plan", "training", "flops_per_s", "told"),
    [
        ({}, {"measured_peak_flops_per_s": 700e12}, 989.5e12, "NVIDIA datasheet, dense"),
        ({}, {"precision": "fp16"}, 989.5e12, "NVIDIA H100 datasheet"),
        ({}, {"precision": "fp32"}, 494.5e12, "NVIDIA H100 datasheet"),
        ({"use_tf32": False}, {"precision": "fp32"}, None, "no source gives the fp32 peak"),
        ({}, OTHER, None, "NVIDIA L40S did the work"),
        ({}, {**OTHER, "measured_peak_flops_per_s": 331e12}, 331e12, MEASURED),
        ({}, {"device": "cpu", "measured_peak_flops_per_s": 1e11}, None, "on the CPU"),
    ],
)
def test_peak_is_of_the_card_that_ran_and_its_precision(
    plan: dict[str, Any],
    training: dict[str, Any],
    flops_per_s: float | None,
    told: str,
    gpu_inputs: ReportInputs,
) -> None:
    found = derive.peak(replace(gpu_inputs.plan, **plan), replace(gpu_inputs.training, **training))
    if isinstance(found, Missing):
        assert flops_per_s is None and told in found.reason
    else:
        assert (found.flops_per_s, found.source) == (flops_per_s, told)


def test_spilled_is_what_the_card_never_held(gpu_inputs: ReportInputs) -> None:
    def spilled(reserved: float | None, device: str = "cuda", **monitor: Any) -> Any:
        held = None if reserved is None else int(reserved)
        return derive.memory_spilled(
            replace(
                gpu_inputs,
                training=replace(
                    gpu_inputs.training, device=device, peak_memory_reserved_bytes=held
                ),
                monitor=replace(gpu_inputs.monitor, **monitor),
            )
        )

    assert (spilled(62.3e9), spilled(70.3e9)) == (0, 8_000_000_000)
    assert isinstance(spilled(None), Missing)
    assert isinstance(spilled(70.3e9, "cpu"), Missing)
    assert isinstance(spilled(70.3e9, memory_used_bytes=None), Missing)


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
    row = next(r for r in build_report(inputs, {}).plan_against_actual if r.unit == "usd")
    assert row.actual == pytest.approx(2.49)
    assert derive.cost_usd(inputs) == pytest.approx(2.49 * 2_712 / 3600)


def test_epochs_started() -> None:
    told = {0.2: 1, 1.0: 1, 1.0000000001: 1, 1.01: 2, 3.0: 3}
    assert {n_epochs: derive.n_epochs_started(n_epochs) for n_epochs in told} == told


def test_gpu_steps_are_split_by_their_samples(gpu_inputs: ReportInputs) -> None:
    sampled = SampledSteps(n_steps=9, h2d_s=0.1, forward_s=0.3, backward_s=0.5, optimizer_s=0.1)
    time = derive.split_time(replace(gpu_inputs.training, sampled_steps=sampled))
    parts = (time.h2d_s, time.train_s, time.forward_s, time.backward_s, time.optimizer_s)
    shares = (0.1, 0.9, 0.3, 0.5, 0.1)
    assert parts == pytest.approx([x * gpu_inputs.training.time.train_s for x in shares])


RETRY = MemoryRetry(after_step=0, micro_batch_size=8, n_accumulation_steps=4, message="short")
NO_TIME = SampledSteps(n_steps=1, h2d_s=0.0, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)
LONG = SampledSteps(n_steps=9, h2d_s=0.0, forward_s=0.3, backward_s=9.0, optimizer_s=0.1)
THROWN_AWAY = "work that was thrown away is not timed"


@pytest.mark.parametrize(
    ("changes", "idle_s", "split", "told"),
    [
        # 2,712 s, less 75.6 s of evaluation and 1,800 steps of 1.383 s
        ({}, 2_712 - 75.6 - 1_800 * 1.383, "sampled steps", "estimate: "),
        ({"sampled_steps": LONG}, 0.0, "sampled steps", "estimate: "),  # busier than the wall
        ({"n_sessions": 2}, None, "sampled steps", THROWN_AWAY),
        ({"memory_retries": (RETRY,)}, None, "sampled steps", THROWN_AWAY),
        ({"sampled_steps": None}, None, None, "no step was timed on the device"),
        ({"sampled_steps": NO_TIME}, None, None, "no step was timed on the device"),
    ],
)
def test_idle_time_is_an_estimate_and_says_so(
    changes: dict[str, Any],
    idle_s: float | None,
    split: str | None,
    told: str,
    gpu_inputs: ReportInputs,
) -> None:
    training = replace(gpu_inputs.training, **{"n_sessions": 1, **changes})
    report = build_report(replace(gpu_inputs, training=training), {})
    time = report.time
    assert (time.split_source or None) == split
    assert (time.gpu_idle_s if idle_s is not None else None) == pytest.approx(idle_s)
    said = report.unavailable.get("time.gpu_idle_s") or str(time.gpu_idle_source)
    assert said.startswith(told)
    if split is None:
        assert not time.forward_s and time.train_s == training.time.train_s


def test_uncalibrated_plan_passes_with_reasons(gpu_inputs: ReportInputs) -> None:
    prior = replace(
        gpu_inputs.plan.cost,
        calibrated=False, step_hours=0.73, save_hours=None, eval_hours=None, startup_hours=None,
    )  # fmt: skip
    inputs = replace(gpu_inputs, plan=replace(gpu_inputs.plan, cost=prior))
    report = build_report(inputs, {})
    check_report(report, inputs)
    assert "not calibrated" in report.unavailable["plan.save_hours"]
