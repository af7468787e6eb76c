"""Rules over the plan, claims of others, and what a run had to do without."""

from typing import Any

import pytest
from report_reading import findings_by_code

from expertflow.report.diagnose import find

Report = dict[str, Any]


def _row(report: Report, quantity: str) -> Report:
    return next(row for row in report["plan_against_actual"] if row["quantity"] == quantity)


def _took(report: Report, hours: float) -> Report:
    _row(report, "Wall time")["actual"] = hours
    return report


@pytest.mark.parametrize(
    ("hours", "speaks"),
    [(0.709, True), (0.71, False), (0.75, False), (0.77, False), (0.771, True)],
)
def test_plan_missed(hours: float, speaks: bool, gpu_report: Report) -> None:
    assert ("plan-missed" in findings_by_code(_took(gpu_report, hours))) is speaks


def test_missed_prior_weighs_less_than_a_missed_calibration(gpu_report: Report) -> None:
    assert findings_by_code(_took(gpu_report, 2.0))["plan-missed"].severity == "warning"
    gpu_report["plan"]["calibrated"] = False
    assert findings_by_code(gpu_report)["plan-missed"].severity == "info"


@pytest.mark.parametrize(
    ("held", "speaks"), [(62.9e9, False), (63e9, False), (63.1e9, True), (None, False)]
)
def test_more_memory_than_planned(held: float | None, speaks: bool, gpu_report: Report) -> None:
    row = _row(gpu_report, "Peak device memory")
    difference = None if held is None else held / row["plan"] - 1
    row |= {"actual": held, "difference_fraction": difference}
    assert ("memory-over-plan" in findings_by_code(gpu_report)) is speaks


def test_only_claims_that_fail_are_repeated(gpu_report: Report) -> None:
    claims = [finding for finding in find(gpu_report) if finding.code == "claim"]
    assert len(claims) == 1
    assert "47 hours" in claims[0].evidence and "minutes" in claims[0].evidence


def test_fallbacks_are_said(gpu_report: Report) -> None:
    assert findings_by_code(gpu_report)["tokenizer-fallback"].severity == "info"
    assert not {"measured-peak", "memory-short"} & set(findings_by_code(gpu_report))
    gpu_report["data"]["tokenizer_fallbacks"] = []
    gpu = gpu_report["training_report"]["hardware"]["gpu"]
    gpu["peak_source"] = "measured matmul on this card"
    retry = {"micro_batch_size": 8, "n_accumulation_steps": 9}
    gpu_report["training_report"]["training"]["memory_retries"] = [retry]
    gpu_report["training_parameters"] |= {"batch_size": 8, "gradient_accumulation_steps": 4}
    found = findings_by_code(gpu_report)
    assert "tokenizer-fallback" not in found
    assert found["measured-peak"].severity == "info"
    advice = found["memory-short"].recommendation
    assert "batch_size to 8 and gradient_accumulation_steps to 4" in advice


def test_epochs_of_another_length_are_not_compared(gpu_report: Report) -> None:
    assert "rows-not-compared" not in findings_by_code(gpu_report)
    gpu_report["training_report"]["training"]["epochs"] = 3.0
    assert "2 of the packed rows" in findings_by_code(gpu_report)["rows-not-compared"].evidence


def test_what_could_not_be_staged_isfindings_by_code(gpu_report: Report) -> None:
    assert "not-staged" not in findings_by_code(gpu_report)
    used = gpu_report["staging"]["used"]
    used["weights"] |= {"is_fallback": True, "reason": "/scratch: No space left on device"}
    said = findings_by_code(gpu_report)["not-staged"]
    assert said.evidence == "weights were read where they are: /scratch: No space left on device"
    assert said.severity == "warning"
