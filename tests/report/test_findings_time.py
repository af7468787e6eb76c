"""Rules over wall time: silent up to the limit, priced above it."""

from typing import Any

import pytest
from report_reading import findings_by_code

Report = dict[str, Any]

LIMITS = [
    ("data-wait", "data_wait_s", 0.05),
    ("checkpoint-time", "checkpoint_s", 0.02),
    ("evaluation-time", "eval_s", 0.05),
    ("start-up", "startup_s", 0.10),
    ("lost-work", "other_s", 0.05),  # the run had two sessions
]


def _unbroken(report: Report) -> Report:
    report["training_report"]["training"] |= {"sessions": 1, "memory_retries": []}
    return report


def _with_share(report: Report, part: str, share: float) -> Report:
    report["time"] |= {"wall_s": 4_000.0, "other_s": 0.0, part: share * 4_000}
    report["profile"] = None
    return report


@pytest.mark.parametrize(("code", "part", "limit"), LIMITS)
@pytest.mark.parametrize(("above", "speaks"), [(-0.001, False), (0.0, False), (0.001, True)])
def test_lost_time(
    code: str, part: str, limit: float, above: float, speaks: bool, gpu_report: Report
) -> None:
    found = findings_by_code(_with_share(gpu_report, part, limit + above))
    assert (code in found) is speaks
    if speaks:
        assert found[code].worth_usd == pytest.approx(2.49 * (limit + above) * 4_000 / 3_600)


def test_start_up_counts_the_tail(gpu_report: Report) -> None:
    _with_share(_unbroken(gpu_report), "startup_s", 0.06)
    assert "start-up" not in findings_by_code(gpu_report)
    gpu_report["time"]["other_s"] = 0.05 * 4_000
    assert "start-up" in findings_by_code(gpu_report)


@pytest.mark.parametrize(
    "how", [{"sessions": 2}, {"memory_retries": [{"micro_batch_size": 1}]}], ids=["kill", "memory"]
)
def test_work_that_was_thrown_away_is_no_start_up(how: Report, gpu_report: Report) -> None:
    _with_share(_unbroken(gpu_report), "other_s", 0.2)
    found = findings_by_code(gpu_report)
    assert "start-up" in found and "lost-work" not in found
    gpu_report["training_report"]["training"] |= how
    found = findings_by_code(gpu_report)
    assert "start-up" not in found
    assert "save more often" in found["lost-work"].recommendation


def test_no_price_no_worth_but_a_reason(gpu_report: Report) -> None:
    gpu_report["cost"]["usd_per_hour"] = None
    finding = findings_by_code(_with_share(gpu_report, "data_wait_s", 0.2))["data-wait"]
    assert finding.worth_usd is None and "price" in (finding.worth_reason or "")


@pytest.mark.parametrize(("peak", "speaks"), [(73.5e9, True), (73.6e9, False), (73.7e9, False)])
def test_recomputation_that_memory_could_spare(
    peak: float, speaks: bool, gpu_report: Report
) -> None:
    gpu_report["training_parameters"]["gradient_checkpointing"] = True
    gpu_report["plan"]["without_checkpointing_peak_bytes"] = peak  # of 80 GB
    gpu_report["model"] |= {"flops_per_token_model": 3e9, "flops_per_token_hardware": 4e9}
    found = findings_by_code(gpu_report)
    assert ("recomputation" in found) is speaks
    if speaks:
        seconds = gpu_report["time"]["train_s"] / 4
        assert found["recomputation"].worth_usd == pytest.approx(2.49 * seconds / 3600)


def test_kept_activations_are_not_recomputed(gpu_report: Report) -> None:
    gpu_report["plan"]["without_checkpointing_peak_bytes"] = 1
    assert "recomputation" not in findings_by_code(gpu_report)
