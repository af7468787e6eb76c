"""Rules over what was learned and how it was answered: at, below and above their thresholds."""

from typing import Any

import made_up_evaluation as made_up
import pytest
from msgspec.structs import replace
from report_reading import findings_by_code

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import Finding

Report = dict[str, Any]
SAME = "no measurable change"


def _of(inputs: ReportInputs, evaluation: EvaluationRecord) -> dict[str, Finding]:
    return findings_by_code(build_report(replace(inputs, evaluation=evaluation), {}))


@pytest.mark.parametrize(
    ("difference", "word", "speaks"),
    [(-0.08, "worse", True), (-0.03, SAME, False), (0.08, "better", False)],
)
def test_regression(difference: float, word: Any, speaks: bool, cpu_inputs: ReportInputs) -> None:
    earlier = made_up.earlier(difference, word)
    found = _of(cpu_inputs, replace(cpu_inputs.evaluation, earlier=earlier))
    assert ("regression" in found) is speaks
    if speaks:
        assert found["regression"].severity == "problem"
        assert "2026-05-30" in found["regression"].evidence
        assert "6b6b6b6b6b6b" in found["regression"].recommendation


@pytest.mark.parametrize(
    ("n_correct", "severity"), [(26, None), (27, "warning"), (47, "warning"), (48, "problem")]
)
def test_baseline_not_beaten(
    n_correct: int, severity: str | None, cpu_inputs: ReportInputs
) -> None:
    evaluation = made_up.make_evaluation(
        before=(0, 6.2), after=(37, 2.11), baselines={"nearest": 1, "constant": n_correct}
    )
    said = _of(cpu_inputs, evaluation).get("baseline-not-beaten")
    assert (said.severity if said else None) == severity
    if said:
        assert "(constant, " in said.evidence
        assert "gives the most common answer; from 4,000 training documents" in said.recommendation
        assert ("more held-out questions" in said.recommendation) is (severity == "warning")


def test_no_change_says_what_would_show_one(gpu_report: Report) -> None:
    assert "no-measurable-change" not in findings_by_code(gpu_report)
    change = gpu_report["evaluation"]["changes"][1]
    change |= {"difference": 0.02, "ci95": [-0.02, 0.06], "n": 100, "change": SAME}
    advice = findings_by_code(gpu_report)["no-measurable-change"].recommendation
    assert "about 720 more held-out questions (evaluation.max_examples" in advice
    change["difference"] = 0.0
    advice = findings_by_code(gpu_report)["no-measurable-change"].recommendation
    assert "no number of questions shows a difference of zero" in advice
    change |= {"difference": 0.03, "ci95": [0.01, 0.06]}
    advice = findings_by_code(gpu_report)["no-measurable-change"].recommendation
    assert "so few answers differ" in advice


def test_a_loss_that_did_not_change_isfindings_by_code(cpu_inputs: ReportInputs) -> None:
    found = _of(cpu_inputs, made_up.make_bare(before=2.1, after=2.09))
    assert "held out loss did not measurably change" in found["no-measurable-change"].evidence


def test_a_task_that_was_not_scored_says_why(cpu_inputs: ReportInputs) -> None:
    found = _of(cpu_inputs, made_up.not_scored(cpu_inputs.evaluation, "Node is not installed"))
    assert "Node is not installed" in found["task-not-scored"].evidence
    assert "task-not-scored" not in _of(cpu_inputs, made_up.make_bare(before=2.1, after=1.0))


@pytest.mark.parametrize(
    ("step", "speaks"), [(600, True), (1200, True), (1800, False)]
)  # the last step, which has the lowest loss too
def test_another_checkpoint(step: int, speaks: bool, gpu_report: Report) -> None:
    published = gpu_report["evaluation"]["published"]
    published["step"] = step
    for candidate in published["candidates"]:
        candidate["published"] = candidate["step"] == step
    found = findings_by_code(gpu_report).get("another-checkpoint")
    assert (found is not None) is speaks
    if found:
        assert found.severity == "info" and "not the last of 1,800" in found.evidence
        assert "lowest held-out loss, 0.547, is at step 1,800" in found.evidence


def test_the_last_step_with_a_higher_loss_is_said(gpu_report: Report) -> None:
    published = gpu_report["evaluation"]["published"]
    published["step"] = 1800
    for candidate in published["candidates"]:
        candidate["published"] = candidate["step"] == 1800
    published["candidates"][2]["held_out_loss"] = 0.58
    assert "is at step 1,200" in findings_by_code(gpu_report)["another-checkpoint"].evidence


def test_advice_goes_by_the_kind_of_error(gpu_report: Report) -> None:
    after, advice = gpu_report["evaluation"]["after"], {}
    for kind in ("timed_out", "empty", "did_not_parse"):
        after["n_by_kind"] = {"correct": 100, kind: 100}
        said = findings_by_code(gpu_report)["one-kind-of-error"]
        assert kind.replace("_", " ") in said.evidence
        advice[kind] = said.recommendation
    assert len(set(advice.values())) == 3


@pytest.mark.parametrize(
    ("wins", "losses", "word", "speaks"),
    [(31, 7, "better", False), (7, 31, "better", True), (31, 7, "worse", True),
     (20, 20, "worse", False), (7, 31, SAME, False)],
)  # fmt: skip
def test_a_judge_that_sees_it_otherwise(
    wins: int, losses: int, word: Any, speaks: bool, gpu_inputs: ReportInputs
) -> None:
    judge = made_up.judge(n_wins=wins, n_losses=losses, n_ties=10)
    loss, metric = gpu_inputs.evaluation.changes
    changes = (loss, replace(metric, change=word))
    evaluation = replace(gpu_inputs.evaluation, judge=judge, changes=changes)
    assert ("judge-disagrees" in _of(gpu_inputs, evaluation)) is speaks


@pytest.mark.parametrize(("n", "speaks"), [(16, False), (17, True)])
def test_a_judge_that_goes_by_position(n: int, speaks: bool, gpu_inputs: ReportInputs) -> None:
    judge = made_up.judge(n_wins=20, n_losses=10, n_ties=20, n_inconsistent=n)
    evaluation = replace(gpu_inputs.evaluation, judge=judge)
    assert ("judge-inconsistent" in _of(gpu_inputs, evaluation)) is speaks


def test_pairs_without_a_verdict_are_said(gpu_report: Report) -> None:
    assert "1 of 51 pairs got no verdict: no verdict in the reply" in (
        findings_by_code(gpu_report)["judge-failed"].evidence
    )
    gpu_report["evaluation"]["judge"] |= {"n_failed": 0, "reason": None}
    assert "judge-failed" not in findings_by_code(gpu_report)


def test_nothing_is_found_of_an_expert_without_a_task(cpu_inputs: ReportInputs) -> None:
    found = _of(cpu_inputs, made_up.make_bare(before=6.2, after=2.1))
    learned = {"regression", "task-not-scored", "baseline-not-beaten", "no-measurable-change",
               "answers-cut-off", "one-kind-of-error", "questions-shared", "judge-disagrees",
               "judge-inconsistent", "judge-failed", "no-baseline", "chosen-by-held-out-loss",
               "questions-not-asked", "checkpoints-not-compared"}  # fmt: skip
    assert not learned & set(found)
