"""Order and honesty of findings, and the manifest's own bars."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.core.errors import ConfigError
from expertflow.report.build import build_report
from expertflow.report.diagnose import accept, find
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import AcceptanceRule

Report = dict[str, Any]

PARTS = ("startup_s", "data_wait_s", "h2d_s", "train_s", "checkpoint_s", "eval_s", "other_s")


@given(st.lists(st.floats(0, 1e5), min_size=len(PARTS), max_size=len(PARTS)), st.floats(1, 4))
def test_all_fixes_together_save_at_most_the_cost(
    gpu_inputs: ReportInputs, seconds: list[float], factor: float
) -> None:
    report = build_report(gpu_inputs, {})
    report["time"] |= dict(zip(PARTS, seconds, strict=True)) | {"wall_s": sum(seconds)}
    report["training_parameters"]["gradient_checkpointing"] = True
    report["plan"]["without_checkpointing_peak_bytes"] = 1
    model = report["model"]
    model["flops_per_token_hardware"] = factor * model["flops_per_token_model"]
    cost = report["cost"]["usd_per_hour"] * sum(seconds) / 3600
    worth = sum(finding.worth_usd or 0.0 for finding in find(report))
    assert worth <= cost * (1 + 1e-9)


def test_what_weighs_most_comes_first(gpu_report: Report) -> None:
    gpu_report["evaluation"]["documents_shared_with_training"] = 3
    gpu_report["time"] |= {"data_wait_s": 300.0, "eval_s": 600.0}
    gpu_report["training_parameters"]["total_steps"] = 49
    codes = [finding.code for finding in find(gpu_report)]
    assert codes[:3] == ["held-out-leak", "evaluation-time", "data-wait"]
    assert codes.index("few-steps") > codes.index("checkpoint-time")


def test_every_finding_says_how_its_worth_came_about(
    gpu_report: Report, cpu_report: Report
) -> None:
    findings = [*gpu_report["findings"], *cpu_report["findings"]]
    assert findings and all(finding["worth_reason"] for finding in findings)


@pytest.mark.parametrize(
    ("path", "op", "value", "expected"),
    [
        ("evaluation.delta.value_fraction", ">", 0.1, "pass"),
        ("evaluation.after.held_out_loss", "<=", 0.5, "fail"),
        ("run.preset", "==", "full", "pass"),
        ("training_report.training.epoch_summaries[1].steps", ">=", 900, "pass"),
        ("training_report.hardware.tensor_active_percent.mean", ">", 25, "pass"),
    ],
)
def test_acceptance(path: str, op: Any, value: Any, expected: str, gpu_report: Report) -> None:
    (result,) = accept(gpu_report, (AcceptanceRule(path=path, op=op, value=value),))
    assert result.verdict == expected
    assert result.rule == f"{path} {op} {value}"


def test_bar_below_a_null_is_not_measured(cpu_report: Report) -> None:
    path = "training_report.hardware.tensor_active_percent.mean"
    (result,) = accept(cpu_report, (AcceptanceRule(path=path, op=">", value=25),))
    assert (result.verdict, result.value) == ("not measured", None)


@pytest.mark.parametrize(("path", "value"), [("cost.eur", 1), ("run.preset", 3), ("cost", 3)])
def test_acceptance_that_cannot_be_judged(path: str, value: Any, gpu_report: Report) -> None:
    with pytest.raises(ConfigError, match=path):
        accept(gpu_report, (AcceptanceRule(path=path, op="<", value=value),))
