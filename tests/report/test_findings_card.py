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


def test_idle_card_names_its_cause_only_where_times_tell_it(gpu_report: Report) -> None:
    _set(gpu_report, any_kernel_percent=50.0)
    assert "do not tell why" in findings_by_code(gpu_report)["idle-card"].evidence
    gpu_report["time"]["eval_s"] = 2_600.0  # which keeps a card busy
    assert "do not tell why" in findings_by_code(gpu_report)["idle-card"].evidence
    gpu_report["time"] |= {"eval_s": 75.6, "data_wait_s": 2_600.0}
    assert "data took 49 % of wall time" in findings_by_code(gpu_report)["idle-card"].evidence


def test_heat_alone_is_no_fault_and_cold_is_none_either(gpu_report: Report) -> None:
    codes = set(findings_by_code(gpu_report))
    for degrees in (99.0, 31.0):
        assert set(findings_by_code(_set(gpu_report, temperature_c=degrees))) == codes


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
