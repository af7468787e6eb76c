"""Rules over the card's counters: at, below and above their thresholds."""

from typing import Any

import pytest
from report_reading import findings_by_code

Report = dict[str, Any]


def _hardware(report: Report) -> Report:
    hardware: Report = report["training_report"]["hardware"]
    return hardware


def _set(report: Report, **medians: float | None) -> Report:
    for name, value in medians.items():
        stats = (
            None if value is None else {**_hardware(report)["power_w"], "mean": value, "p50": value}
        )
        _hardware(report)[name] = stats
    return report


@pytest.mark.parametrize(
    ("tensor", "sm", "speaks"),
    [(24.9, 80.1, True), (25.0, 80.1, False), (24.9, 80.0, False), (None, 90.0, False),
     (10.0, None, False)],
)  # fmt: skip
def test_memory_bound_kernels(
    tensor: float | None, sm: float | None, speaks: bool, gpu_report: Report
) -> None:
    _set(gpu_report, tensor_active_percent=tensor, sm_active_percent=sm)
    assert ("memory-bound-kernels" in findings_by_code(gpu_report)) is speaks


@pytest.mark.parametrize(
    ("kernel", "power_w", "sm", "speaks"),
    [
        (90.1, 419.0, None, True),
        (90.0, 419.0, None, False),
        (90.1, 420.0, None, False),
        (90.1, 419.0, 81.0, False),  # busy multiprocessors: the kernels are not small
        (90.1, 419.0, 80.0, True),
        (None, 419.0, None, False),
    ],
)
def test_small_kernels(
    kernel: float | None, power_w: float, sm: float | None, speaks: bool, gpu_report: Report
) -> None:
    _set(gpu_report, any_kernel_percent=kernel, power_w=power_w, sm_active_percent=sm)
    assert ("small-kernels" in findings_by_code(gpu_report)) is speaks


@pytest.mark.parametrize(("code", "low"), [("memory-bound-kernels", 5.0), ("idle-card", 5.0)])
@pytest.mark.parametrize(("samples", "speaks"), [(19, False), (20, True)])
def test_counters_need_samples(
    samples: int, speaks: bool, code: str, low: float, gpu_report: Report
) -> None:
    _set(gpu_report, tensor_active_percent=low, any_kernel_percent=low)
    _hardware(gpu_report)["samples"] = samples
    assert (code in findings_by_code(gpu_report)) is speaks


@pytest.mark.parametrize(("mean", "speaks"), [(59.9, True), (60.0, False), (60.1, False)])
def test_idle_card(mean: float, speaks: bool, gpu_report: Report) -> None:
    assert ("idle-card" in findings_by_code(_set(gpu_report, any_kernel_percent=mean))) is speaks


def test_idle_card_names_its_cause_only_where_times_tell_it(gpu_report: Report) -> None:
    _set(gpu_report, any_kernel_percent=50.0)
    assert "do not tell why" in findings_by_code(gpu_report)["idle-card"].evidence
    gpu_report["time"]["eval_s"] = 2_600.0  # which keeps a card busy
    assert "do not tell why" in findings_by_code(gpu_report)["idle-card"].evidence
    gpu_report["time"] |= {"eval_s": 75.6, "data_wait_s": 2_600.0}
    assert "data took 49 % of wall time" in findings_by_code(gpu_report)["idle-card"].evidence


@pytest.mark.parametrize(("hot_s", "speaks"), [(26.7, False), (26.8, False), (26.9, True)])
def test_throttling_for_heat(hot_s: float, speaks: bool, gpu_report: Report) -> None:
    _hardware(gpu_report)["throttle_s"] = {"power": 2_000.0, "thermal": hot_s}  # of 2,680 s
    assert ("thermal-throttling" in findings_by_code(gpu_report)) is speaks


def test_heat_alone_is_no_fault_and_cold_is_none_either(gpu_report: Report) -> None:
    codes = set(findings_by_code(gpu_report))
    for degrees in (99.0, 31.0):
        assert set(findings_by_code(_set(gpu_report, temperature_c=degrees))) == codes


@pytest.mark.parametrize(("spilled", "speaks"), [(0.7e9, False), (0.8e9, False), (0.9e9, True)])
def test_memory_spilled(spilled: float, speaks: bool, gpu_report: Report) -> None:
    _hardware(gpu_report)["memory_spilled_bytes"] = spilled  # of 80 GB
    assert ("memory-spilled" in findings_by_code(gpu_report)) is speaks


@pytest.mark.parametrize(("peak", "speaks"), [(73.5e9, True), (73.6e9, False), (73.7e9, False)])
def test_room_for_the_next_micro_batch(peak: float, speaks: bool, gpu_report: Report) -> None:
    gpu_report["plan"]["next_micro_batch_peak_bytes"] = peak  # of 80 GB
    found = findings_by_code(gpu_report)
    assert ("memory-room" in found) is speaks
    if speaks:
        assert found["memory-room"].recommendation == (
            "batch_size: 32, gradient_accumulation_steps: 1"
        )


@pytest.mark.parametrize(
    "change", ["no accumulation", "odd", "memory was short", "more than planned"]
)
def test_no_advice_to_fill_memory(change: str, gpu_report: Report) -> None:
    gpu_report["plan"]["next_micro_batch_peak_bytes"] = 70e9
    assert "memory-room" in findings_by_code(gpu_report)
    if change == "no accumulation":
        gpu_report["training_parameters"]["gradient_accumulation_steps"] = 1
    elif change == "odd":  # half of it is another global batch
        gpu_report["training_parameters"]["gradient_accumulation_steps"] = 3
    elif change == "memory was short":
        retry = {"micro_batch_size": 8, "n_accumulation_steps": 4}
        gpu_report["training_report"]["training"]["memory_retries"] = [retry]
    else:  # the run took 10 % more than predicted, so the next one would, too
        _hardware(gpu_report)["memory_peak_reserved_bytes"] = 1.1 * 63e9
    assert "memory-room" not in findings_by_code(gpu_report)
