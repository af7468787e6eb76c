"""Plan against actual, by hand."""

from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.report.build import build_report
from expertflow.report.check.report import check_report
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]


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


def test_uncalibrated_plan_passes_with_reasons(
    gpu_inputs: ReportInputs, schema: dict[str, Any]
) -> None:
    prior = replace(
        gpu_inputs.plan.cost,
        calibrated=False, step_hours=0.73, save_hours=None, eval_hours=None, startup_hours=None,
    )  # fmt: skip
    inputs = replace(gpu_inputs, plan=replace(gpu_inputs.plan, cost=prior))
    report = build_report(inputs, {})
    check_report(report, schema, inputs)
    assert "not calibrated" in report["unavailable"]["plan.save_hours"]
