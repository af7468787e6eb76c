"""Figures that follow from measurements, by hand."""

from typing import Any

import pytest
from made_up_runs import CPU, GPU
from msgspec.structs import replace

from expertflow.report import derive
from expertflow.report.build import build_report
from expertflow.report.compare import index_row
from expertflow.report.headline import make_tiles
from expertflow.report.measured import Missing
from expertflow.train.records import MemoryRetry, SampledSteps

OTHER = {"gpu_name": "NVIDIA L40S"}
BOTH = {"gpu_names": ("NVIDIA L40S", "NVIDIA H100 80GB HBM3")}
MEASURED = "measured matmul on this card"
SHEET = "NVIDIA H100 datasheet"
TIME = GPU.inputs.training.time


def test_mfu_by_hand() -> None:
    # 86.4 M tokens in 2494.1 + 21.4 s, 2.62 GFLOP per token, of 989.5 TFLOP/s
    expected = 86.4e6 / 2_515.5 * 2.62e9 / 989.5e12
    for training, found in (
        ({}, expected),
        ({"world_size": 2}, expected / 2),
        ({"time": replace(TIME, h2d_s=100.0)}, expected * 2_515.5 / 2_615.5),
    ):
        assert derive.utilization(GPU.change(training=training), 2.62e9) == pytest.approx(found)
    tiles = make_tiles(GPU.report_with(training={"precision": "fp32"}))
    assert [tile.note for tile in tiles if tile.label == "MFU"] == ["of 494\u00a0TFLOP/s TF32"]
    nameless = make_tiles(GPU.report_with(training={"gpu_name": None}))
    assert [tile.value for tile in nameless][-1] == "61.5\u00a0GB", "the card's, not the host's"


@pytest.mark.parametrize(
    ("plan", "training", "told"),
    [
        ({}, {"measured_peak_flops_per_s": 700e12}, (989.5e12, "NVIDIA datasheet, dense")),
        ({}, {"precision": "fp16"}, (989.5e12, SHEET)),
        ({}, {"precision": "fp32"}, (494.5e12, SHEET)),
        ({"use_tf32": False}, {"precision": "fp32"}, "no source gives the fp32 peak"),
        ({}, OTHER, "NVIDIA L40S did the work"),
        ({}, BOTH, "planned for NVIDIA H100 80GB HBM3, but NVIDIA L40S did the work"),
        ({}, {**BOTH, "measured_peak_flops_per_s": 331e12}, "NVIDIA L40S did the work"),
        ({}, {**OTHER, "measured_peak_flops_per_s": 331e12}, (331e12, MEASURED)),
        ({}, {"device": "cpu"}, "on the CPU"),
        ({}, {"device": "cpu", "measured_peak_flops_per_s": 1e11}, (1e11, derive.MEASURED_ON_CPU)),
    ],
)
def test_peak_is_of_the_card_that_ran_at_its_precision(plan: Any, training: Any, told: Any) -> None:
    inputs = GPU.change(plan=plan, training=training)
    found = derive.peak(inputs.plan, inputs.training)
    if isinstance(found, Missing):
        assert told in found.reason
    else:
        assert (found.flops_per_s, found.source) == told


def test_a_cpus_peak_is_its_measured_speed_and_its_price_is_hourly() -> None:
    speed = 86_400_000 / 2_515.5  # tokens per second
    flops_per_token = CPU.inputs.plan.flops_per_token_model
    measured = {"measured_peak_flops_per_s": 4 * speed * flops_per_token}
    cost = replace(CPU.inputs.plan.cost, price_usd_per_hour=0.3)
    report = CPU.report_with(training=measured, plan={"cost": cost})
    assert report.throughput.mfu_fraction == pytest.approx(0.25)
    (tile,) = (tile for tile in make_tiles(report) if tile.label == "MFU")
    assert tile.value == "25\u00a0%" and tile.note == f"of {derive.MEASURED_ON_CPU}"
    assert f"at 25 % of {derive.MEASURED_ON_CPU}." in report.verdict.sentence
    assert report.cost.usd == pytest.approx(0.3 * 2_712 / 3600)
    # Measured on a busy machine, it is not a peak.
    slow = CPU.report_with(training={"measured_peak_flops_per_s": speed})
    assert "slowed this machine" in slow.unavailable["throughput.mfu_fraction"]


def test_spilled_memory_and_energy_are_those_of_the_cards() -> None:
    def spilled(reserved: int | None, **monitor: Any) -> Any:
        training = {"peak_memory_reserved_bytes": reserved}
        return derive.memory_spilled(GPU.change(training=training, monitor=monitor))

    held = 70_300_000_000
    assert (spilled(62_300_000_000), spilled(held)) == (0, 8_000_000_000)
    for missing in (spilled(None), spilled(held, memory_used_bytes=None)):
        assert isinstance(missing, Missing)
    energy = {"energy_j": 1.8e6, "energy_all_j": 3.6e6}
    two = GPU.change(training={"world_size": 2}, monitor=energy)
    assert derive.energy_kwh(two) == pytest.approx(1.0)


def test_billing_steps_and_epochs_round_up() -> None:
    inputs = GPU.change(plan={"cost": replace(GPU.inputs.plan.cost, billing_minutes=60.0)})
    assert derive.cost_usd(inputs, billed=True) == pytest.approx(2.49)
    report = build_report(inputs, {})
    row = next(r for r in report.plan_against_actual if r.unit == "usd")
    assert row.actual == index_row(report)["usd"] == pytest.approx(2.49)
    assert next(tile for tile in make_tiles(report) if "cost" in tile.label).value == "$2.49"
    assert derive.cost_usd(inputs) == pytest.approx(2.49 * 2_712 / 3600)
    told = {0.2: 1, 1.0: 1, 1.0000000001: 1, 1.01: 2, 3.0: 3}
    assert {n_epochs: derive.n_epochs_started(n_epochs) for n_epochs in told} == told


def test_work_on_another_card_has_no_price() -> None:
    own = GPU.inputs.plan.gpu
    assert own is not None and not own.driver_names
    assert derive.cost_usd(GPU.change(training=OTHER)) == derive.cost_usd(GPU.inputs)
    listed = replace(own, name="H100 SXM", driver_names=(own.name,))
    for training in (OTHER, BOTH):
        found = derive.cost_usd(GPU.change(training=training, plan={"gpu": listed}))
        assert found == Missing("the price is for H100 SXM, but NVIDIA L40S did the work")
    assert derive.cost_usd(GPU.change(plan={"gpu": listed})) == derive.cost_usd(GPU.inputs)


def sampled(h2d_s: float, forward_s: float, backward_s: float, optimizer_s: float) -> SampledSteps:
    return SampledSteps(
        n_steps=9, h2d_s=h2d_s, forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s
    )


RETRY = MemoryRetry(after_step=0, micro_batch_size=8, n_accumulation_steps=4, message="short")
LONG, NO_TIME = sampled(0.0, 0.3, 9.0, 0.1), sampled(0.0, 0.0, 0.0, 0.0)
THROWN_AWAY = "discarded work is not timed"


@pytest.mark.parametrize(
    ("changes", "idle_s", "split", "told"),
    [
        # 2,712 s, less 75.6 s of evaluation and 1,800 steps of 1.383 s
        ({}, 2_712 - 75.6 - 1_800 * 1.383, "sampled steps", None),
        ({"sampled_steps": LONG}, 0.0, "sampled steps", None),  # busier than the wall
        ({"n_sessions": 2}, None, "sampled steps", THROWN_AWAY),
        ({"memory_retries": (RETRY,)}, None, "sampled steps", THROWN_AWAY),
        ({"sampled_steps": None}, None, None, "no step was timed on the device"),
        ({"sampled_steps": NO_TIME}, None, None, "no step was timed on the device"),
    ],
)
def test_idle_time_is_an_estimate_or_has_a_reason(
    changes: Any, idle_s: float | None, split: str | None, told: str | None
) -> None:
    report = GPU.report_with(training={"n_sessions": 1, **changes})
    time = report.time
    assert (time.split_source or None) == split
    assert (time.gpu_idle_s if idle_s is not None else None) == pytest.approx(idle_s)
    assert report.unavailable.get("time.gpu_idle_s") == told
    if split is None:
        assert not time.forward_s and time.train_s == TIME.train_s
