"""Rules over comparisons that are missing, or that the choice of the weights spoils."""

from typing import Any

import made_up_evaluation as made_up
import pytest
from msgspec.structs import replace
from report_reading import findings_by_code

from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]
SPOILT = "so the change is optimistic"
TOO_FEW = "too few training questions to learn one from"


def _without_baselines(inputs: ReportInputs, why: str) -> Report:
    record = replace(inputs.evaluation, baselines=(), unavailable={"baselines": why})
    return build_report(replace(inputs, evaluation=record), {})


def test_a_score_without_a_baseline_is_said(gpu_inputs: ReportInputs, gpu_report: Report) -> None:
    report = _without_baselines(gpu_inputs, TOO_FEW)
    said = findings_by_code(report)["no-baseline"]
    assert said.severity == "warning" and TOO_FEW in said.evidence
    assert (
        f"No answer without a model was compared with it: {TOO_FEW}."
        in (report["verdict"]["sentence"])
    )
    assert report["verdict"]["learned"] == "yes"
    assert "no-baseline" not in findings_by_code(gpu_report)


def test_a_baseline_without_a_score_is_none(gpu_report: Report) -> None:
    for baseline in gpu_report["evaluation"]["baselines"]:
        baseline["value_fraction"] = baseline["change"] = None
    assert "no-baseline" in findings_by_code(gpu_report)


def test_nobody_misses_a_baseline_that_was_not_asked_for(gpu_inputs: ReportInputs) -> None:
    report = _without_baselines(gpu_inputs, "evaluation.baselines is false")
    assert "no-baseline" not in findings_by_code(report)
    assert "No answer without a model" not in report["verdict"]["sentence"]
    record = made_up.not_scored(gpu_inputs.evaluation, "Node is not installed")
    assert "no-baseline" not in findings_by_code(
        build_report(replace(gpu_inputs, evaluation=record), {})
    )


@pytest.mark.parametrize(
    ("plan", "training", "speaks"),
    [
        ({}, {}, False),
        ({"load_best_model_at_end": True}, {}, True),
        ({"patience": 2}, {}, True),
        ({}, {"published_step": 30}, True),
        ({"patience": 2}, {"n_points": 1}, False),  # one loss is no choice
    ],
)
def test_a_loss_that_also_chose_the_weights(
    plan: Report, training: Report, speaks: bool, cpu_inputs: ReportInputs
) -> None:
    done = cpu_inputs.training
    points = done.eval_points[: training.pop("n_points", 2)]
    inputs = replace(
        cpu_inputs,
        plan=replace(cpu_inputs.plan, **plan),
        training=replace(done, eval_points=points, **training),
        evaluation=made_up.make_bare(before=6.2, after=2.11),
    )
    report = build_report(inputs, {})
    said = findings_by_code(report).get("chosen-by-held-out-loss")
    assert (said is not None) is speaks
    assert (SPOILT in report["verdict"]["sentence"]) is speaks
    if said:
        assert said.severity == "info"
        assert all(f"training.{name}" in said.evidence for name in plan)


def test_a_metric_is_not_spoilt_by_a_choice_by_loss(cpu_inputs: ReportInputs) -> None:
    plan = replace(cpu_inputs.plan, load_best_model_at_end=True)
    report = build_report(replace(cpu_inputs, plan=plan), {})
    assert "chosen-by-held-out-loss" not in findings_by_code(report)
    assert SPOILT not in report["verdict"]["sentence"]


@pytest.mark.parametrize(
    ("n_kept", "is_compared", "metric", "speaks"),
    [(3, False, "execution_accuracy", True), (1, False, "execution_accuracy", False),
     (3, True, "execution_accuracy", False), (3, False, None, False)],
)  # fmt: skip
def test_kept_checkpoints_that_nobody_compared(
    n_kept: int, is_compared: bool, metric: str | None, speaks: bool, gpu_report: Report
) -> None:
    gpu_report["training_report"]["training"]["n_candidates"] = n_kept
    evaluation = gpu_report["evaluation"]
    evaluation["metric"] = metric
    why = "the weights that training published: 7 held-out questions are left to choose by"
    if not is_compared:
        evaluation["published"] |= {"candidates": [], "reason": why}
    said = findings_by_code(gpu_report).get("checkpoints-not-compared")
    assert (said is not None) is speaks
    if said:
        assert said.severity == "info" and "3 checkpoints" in said.evidence
        assert why in said.evidence


def test_questions_that_were_not_asked_miss_no_form(gpu_report: Report) -> None:
    after = gpu_report["evaluation"]["after"]
    after["n_by_kind"] = {"correct": 50, "not_asked": 150}
    found = findings_by_code(gpu_report)
    assert "questions-not-asked" in found
    assert "one-kind-of-error" not in found
