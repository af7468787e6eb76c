"""The bottleneck is the largest part of wall time, and inside a step what counters say."""

from typing import Any

import pytest

from expertflow.report.bottleneck import bottleneck

Report = dict[str, Any]


def _set(report: Report, **medians: float | None) -> Report:
    hardware = report["training_report"]["hardware"]
    for name, value in medians.items():
        hardware[name] = None if value is None else {**hardware["power_w"], "p50": value}
    return report


@pytest.mark.parametrize(
    ("part", "expected"),
    [("data_wait_s", "data"), ("h2d_s", "data"), ("checkpoint_s", "checkpoint"),
     ("eval_s", "evaluation"), ("startup_s", "start-up"), ("other_s", "lost-work")],
)  # fmt: skip
def test_largest_part_of_wall_time(part: str, expected: str, gpu_report: Report) -> None:
    gpu_report["time"][part] = 9_000.0
    assert bottleneck(gpu_report)["class"] == expected


def test_the_rest_of_an_unbroken_run_is_start_up(gpu_report: Report) -> None:
    gpu_report["training_report"]["training"]["sessions"] = 1
    gpu_report["time"]["other_s"] = 9_000.0
    assert bottleneck(gpu_report)["class"] == "start-up"


@pytest.mark.parametrize(
    ("tensor", "sm", "kernel", "power_w", "expected"),
    [
        (50.0, 90.0, 97.0, 650.0, "compute"),
        (49.9, 90.0, 97.0, 650.0, "step"),
        (24.9, 80.1, 97.0, 400.0, "memory-bound kernels"),
        (24.9, 60.0, 97.0, 400.0, "small kernels"),
        (None, None, 97.0, 400.0, "small kernels"),
        (None, None, 97.0, 600.0, "step"),
        (None, None, None, None, "step"),
    ],
)
def test_counters_name_the_limit_inside_a_step(
    tensor: float | None,
    sm: float | None,
    kernel: float | None,
    power_w: float | None,
    expected: str,
    gpu_report: Report,
) -> None:
    _set(gpu_report, tensor_active_percent=tensor, sm_active_percent=sm, any_kernel_percent=kernel)
    found = bottleneck(_set(gpu_report, power_w=power_w))
    assert found["class"] == expected
    assert found["confidence"] == ("medium" if expected == "step" else "high")


@pytest.mark.parametrize(("mfu", "expected"), [(0.40, "compute"), (0.39, "step")])
def test_without_counters_utilisation_shows_arithmetic(
    mfu: float, expected: str, gpu_report: Report
) -> None:
    _set(gpu_report, tensor_active_percent=None, sm_active_percent=None)
    gpu_report["throughput"]["mfu_fraction"] = mfu
    assert bottleneck(gpu_report)["class"] == expected


def test_few_samples_are_no_evidence(gpu_report: Report) -> None:
    _set(gpu_report, tensor_active_percent=60.0)
    gpu_report["training_report"]["hardware"]["samples"] = 19
    assert bottleneck(gpu_report)["class"] == "step"


def test_a_short_run_is_not_sure_of_anything(gpu_report: Report) -> None:
    gpu_report["time"] |= {"wall_s": 59.0, "startup_s": 9_000.0}
    assert bottleneck(gpu_report) | {"evidence": []} == {
        "class": "start-up",
        "confidence": "low",
        "evidence": [],
    }


def test_no_time_no_answer(gpu_report: Report) -> None:
    for part in gpu_report["time"]:
        gpu_report["time"][part] = 0.0
    assert bottleneck(gpu_report)["class"] == "unknown"
