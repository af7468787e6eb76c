"""Advice that fits the run: overfitting, padding of packed rows, changes of too few documents."""

from typing import Any

import pytest
from made_up_runs import CPU
from report_reading import changed

from expertflow.report.diagnose import list_findings
from expertflow.report.learned import judge_run
from expertflow.report.records import Report

POINTS = "training_report.training.eval_points"


def with_losses(report: Report, *losses: float, **changes: Any) -> Report:
    points = [
        {"step": 300 * i, "loss": loss, "n_target_tokens": 9, "eval_s": 1.0}
        for i, loss in enumerate(losses)
    ]
    training = {f"training_report.training.{key}": value for key, value in changes.items()}
    return changed(report, {POINTS: points, **training})


def test_a_rise_is_a_finding_and_in_the_verdict() -> None:
    report = with_losses(CPU.report, 6.1, 2.0, 1.5, 11.5)
    found = {finding.code: finding for finding in list_findings(report)}
    assert "from 1.500 after step 600 to 11.500 after step 900" in found["overfitting"].evidence
    assert "near step 600" in found["overfitting"].recommendation
    assert found["overfitting"].severity == "warning"
    assert "It overfitted: from step 600 to 900" in judge_run(report).sentence
    longer = [f.code for f in list_findings(report) if "train longer" in f.recommendation]
    assert not longer
    other = with_losses(CPU.report, 6.1, 2.0, 1.5, 11.5, published_step=600)
    severities = {f.code: f.severity for f in list_findings(other)}
    assert severities["overfitting"] == "info", "the weights at the lowest are published"


@pytest.mark.parametrize(
    ("losses", "changes"),
    [
        ((6.1, 2.0, 1.5, 1.52), {}),  # within 2 %
        ((0.2, 0.1, 0.05, 0.059), {}),  # within 0.01 nats
        ((6.1, 2.0, 1.5, 11.5), {"loss_first": 1.0, "loss_last": 1.0}),  # it diverged
        ((6.1,), {}),
        ((), {}),
    ],
)
def test_what_is_no_overfitting(losses: tuple[float, ...], changes: dict[str, Any]) -> None:
    report = with_losses(CPU.report, *losses, **changes)
    assert "overfitting" not in {finding.code for finding in list_findings(report)}
    assert "overfitted" not in judge_run(report).sentence


def test_packed_rows_are_not_told_to_be_packed() -> None:
    for packing, advice in (("none", "packing: bfd"), ("bfd", "19,800 documents fill 28,800 rows")):
        report = changed(CPU.report, {"data.padding_fraction": 0.33, "data.packing": packing})
        found = {finding.code: finding for finding in list_findings(report)}
        assert advice in found["padding"].recommendation


def test_an_interval_without_zero_on_few_documents_is_no_missing_change() -> None:
    change = {"quantity": "held_out_loss", "difference": 5.395, "ci95": [5.012, 5.663], "n": 2,
              "change": "no measurable change"}  # fmt: skip
    report = changed(
        CPU.report, {"evaluation.task": "held_out_loss", "evaluation.changes": [change]}
    )
    (found,) = (f for f in list_findings(report) if f.code == "no-measurable-change")
    assert "too few of the 2 differ to decide it" in found.evidence
    assert "too few of the 2 differ to decide it" in judge_run(report).sentence
