"""What was learned: verdicts, comparisons that decide, and findings at, below and above limits."""

import math
from typing import Any

import made_up_evaluation as made_up
import pytest
from msgspec.structs import replace
from report_reading import changed, findings_by_code

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report import learned
from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.learned import judge_run as verdict
from expertflow.report.records import Finding, Report, Verdict

SAME = "no measurable change"


def _metric(report: Report, difference: float, half: float, word: str) -> Report:
    ci95 = [difference - half, difference + half]
    return _with_metric(report, difference=difference, ci95=ci95, change=word)


def _with_metric(report: Report, **change: Any) -> Report:
    return changed(report, {f"evaluation.changes.1.{k}": v for k, v in change.items()})


def _judged(inputs: ReportInputs, evaluation: EvaluationRecord) -> Verdict:
    inputs = replace(inputs, evaluation=evaluation)
    return build_report(inputs, {}).verdict


def test_the_paired_change_decides(gpu_report: Report) -> None:
    assert verdict(gpu_report).learned == "yes"
    assert "(+56.5 points, 95 % interval +49.7 to +63.3)" in verdict(gpu_report).sentence
    unclear = verdict(_metric(gpu_report, 0.01, 0.02, SAME))
    assert (unclear.level, unclear.learned) == ("mixed", "unclear")
    assert "no measurable change (+1.0 points, 95 % interval" in unclear.sentence
    assert "Held-out loss fell from 1.874 to 0.566" in unclear.sentence
    leaked = changed(gpu_report, {"evaluation.documents_shared_with_training": 1})
    assert verdict(leaked).learned == "unclear"
    worse = verdict(_metric(gpu_report, -0.15, 0.05, "worse"))
    assert (worse.level, worse.learned) == ("bad", "no")
    assert "Execution accuracy fell" in worse.sentence


def test_what_an_answer_without_a_model_equals_is_not_learned(cpu_inputs: ReportInputs) -> None:
    sides = {"before": (0, 6.2), "after": (37, 2.11)}
    for n_correct, level, answer, said in (
        (20, "good", "yes", "It beats the best answer without a model (constant, 10.0 %)"),
        (40, "mixed", "unclear", "does not measurably beat answering without a model (constant,"),
        (60, "bad", "no", "It is worse than answering without a model (constant, 30.0 %)"),
    ):
        found = _judged(
            cpu_inputs,
            made_up.make_evaluation(**sides, baselines={"nearest": 3, "constant": n_correct}),
        )
        assert (found.level, found.learned) == (level, answer)
        assert said in found.sentence
        assert "Execution accuracy rose from 0.0 % to 18.5 %" in found.sentence


def test_the_loss_decides(cpu_inputs: ReportInputs) -> None:
    for after, answer, said in (
        (0.566, "yes", "Held-out loss fell from 1.874 to 0.566 nats a token on 200 held-out doc"),
        (1.88, "unclear", "1.880 nats a token on 200 held-out documents: no measurable change"),
    ):
        found = _judged(cpu_inputs, made_up.make_bare(before=1.874, after=after))
        assert found.learned == answer and said in found.sentence
    bare = made_up.make_bare(before=1.874, after=0.566)
    bare = replace(bare, changes=(), unavailable={"changes": "there is one document only"})
    found = _judged(cpu_inputs, bare)
    assert (found.level, found.learned) == ("mixed", "unclear")
    assert found.sentence.startswith("There is one document only. Held-out loss went from 1.874")


def test_an_unscored_task_is_not_answered_for_by_its_loss(cpu_inputs: ReportInputs) -> None:
    found = _judged(cpu_inputs, made_up.not_scored(cpu_inputs.evaluation, "Node is not installed"))
    assert (found.level, found.learned) == ("mixed", "unclear")
    assert "The task was not scored: Node is not installed. Held-out loss fell" in found.sentence
    said = _of(cpu_inputs, made_up.not_scored(cpu_inputs.evaluation, "Node is not installed"))
    assert "Node is not installed" in said["task-not-scored"].evidence
    assert "no-baseline" not in said


def test_more_questions_by_hand() -> None:
    """A standard error of 2 points at 100 questions; 1 point is seen in 80 % at 2.8 of them."""
    half = 1.959964 * 0.02
    change = made_up.change("loss", 0.01, half=half, n=100, word=SAME)
    needed = 100 * (2.801585 * 0.02 / 0.01) ** 2
    assert learned.n_more_to_see(change) == math.ceil(needed) - 100
    # Half the difference takes four times the questions, in all.
    smaller = replace(change, difference=0.005)
    assert learned.n_more_to_see(smaller) == math.ceil(4 * needed) - 100
    assert learned.n_more_to_see(replace(change, difference=0.0)) is None


def test_the_best_baseline_is_the_one_that_scores_highest(gpu_report: Report) -> None:
    best = learned.best_baseline(gpu_report.evaluation)
    assert best is not None and best.name == "nearest"
    # Of equals, the one that the expert beats least surely.
    place = "evaluation.baselines"
    values = {"value_fraction": best.value_fraction, "change.ci95": [0.1, 0.5]}
    equal = changed(gpu_report, {f"{place}.0.{key}": value for key, value in values.items()})
    first = learned.best_baseline(equal.evaluation)
    assert first is not None and first.name == "constant"
    keys = [f"{place}.{i}.{key}" for i in range(3) for key in ("value_fraction", "change")]
    unscored = changed(gpu_report, dict.fromkeys(keys))
    assert learned.best_baseline(unscored.evaluation) is None
    assert "no-baseline" in findings_by_code(unscored)


def _of(inputs: ReportInputs, evaluation: EvaluationRecord) -> dict[str, Finding]:
    return findings_by_code(build_report(replace(inputs, evaluation=evaluation), {}))


def test_regression(cpu_inputs: ReportInputs) -> None:
    word: Any
    for difference, word in ((-0.03, SAME), (0.08, "better")):
        earlier = made_up.earlier(difference, word)
        assert "regression" not in _of(cpu_inputs, replace(cpu_inputs.evaluation, earlier=earlier))
    earlier = made_up.earlier(-0.08, "worse")
    found = _of(cpu_inputs, replace(cpu_inputs.evaluation, earlier=earlier))["regression"]
    assert found.severity == "problem"
    assert "2026-05-30" in found.evidence and "6b6b6b6b6b6b" in found.recommendation


@pytest.mark.parametrize(
    ("n_correct", "severity"), [(26, None), (27, "warning"), (47, "warning"), (48, "problem")]
)
def test_baseline_unbeaten(n_correct: int, severity: str | None, cpu_inputs: ReportInputs) -> None:
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
    for difference, low, said in (
        (0.02, -0.02, "about 720 more held-out questions (evaluation.max_examples"),
        (0.0, -0.02, "no number of questions shows a difference of zero"),
        (0.03, 0.01, "so few answers differ"),
    ):
        report = _with_metric(
            gpu_report, difference=difference, ci95=[low, 0.06], n=100, change=SAME
        )
        assert said in findings_by_code(report)["no-measurable-change"].recommendation


LOWEST = "not the last of 1,800; the lowest held-out loss, 0.547, is at step 1,800"


@pytest.mark.parametrize(
    ("step", "last_loss", "said"),
    [
        (600, 0.547, LOWEST),
        (1200, 0.547, LOWEST),
        (1800, 0.547, None),  # the last step, which has the lowest loss too
        (1800, 0.58, "is at step 1,200"),
    ],
)
def test_a_checkpoint(step: int, last_loss: float, said: str | None, gpu_report: Report) -> None:
    place = "evaluation.published"
    changes: dict[str, Any] = {
        f"{place}.candidates.{i}.published": kept == step
        for i, kept in enumerate((600, 1200, 1800))
    }
    changes |= {f"{place}.step": step, f"{place}.candidates.2.held_out_loss": last_loss}
    found = findings_by_code(changed(gpu_report, changes)).get("another-checkpoint")
    assert (found is None) is (said is None)
    if found:
        assert found.severity == "info" and str(said) in found.evidence


def test_a_judge_that_sees_it_otherwise(gpu_inputs: ReportInputs) -> None:
    loss, metric = gpu_inputs.evaluation.changes
    word: Any
    for wins, losses, word, speaks in (
        (31, 7, "better", False), (7, 31, "better", True), (31, 7, "worse", True),
        (20, 20, "worse", False), (7, 31, SAME, False),
    ):  # fmt: skip
        judge = made_up.judge(n_wins=wins, n_losses=losses, n_ties=10)
        changes = (loss, replace(metric, change=word))
        evaluation = replace(gpu_inputs.evaluation, judge=judge, changes=changes)
        assert ("judge-disagrees" in _of(gpu_inputs, evaluation)) is speaks


def test_a_judge_that_goes_by_position_or_gives_no_verdict(gpu_inputs: ReportInputs) -> None:
    for n_unsure, is_odd in ((16, False), (17, True)):
        judge = made_up.judge(n_wins=20, n_losses=10, n_ties=20, n_inconsistent=n_unsure)
        found = _of(gpu_inputs, replace(gpu_inputs.evaluation, judge=judge))
        assert ("judge-inconsistent" in found) is is_odd
    assert "1 of 51 pairs got no verdict: no verdict in the" in found["judge-failed"].evidence
    judge = replace(judge, n_pairs=50, n_failed=0, reason=None)
    found = _of(gpu_inputs, replace(gpu_inputs.evaluation, judge=judge))
    assert "judge-failed" not in found


def test_nothing_is_found_of_an_expert_without_a_task(cpu_inputs: ReportInputs) -> None:
    found = _of(cpu_inputs, made_up.make_bare(before=2.1, after=2.09))
    assert "held out loss did not measurably change" in found["no-measurable-change"].evidence
    found = _of(cpu_inputs, made_up.make_bare(before=6.2, after=2.1))
    learned = {"regression", "task-not-scored", "baseline-not-beaten", "no-measurable-change",
               "answers-cut-off", "one-kind-of-error", "questions-shared", "judge-disagrees",
               "judge-inconsistent", "judge-failed", "no-baseline", "chosen-by-held-out-loss",
               "questions-not-asked", "checkpoints-not-compared"}  # fmt: skip
    assert not learned & set(found)


SPOILT = "so the change is optimistic"

TOO_FEW = "too few training questions to learn one from"


def test_a_score_without_a_baseline_is_said(gpu_inputs: ReportInputs) -> None:
    for why, is_missed in ((TOO_FEW, True), ("evaluation.baselines is false", False)):
        record = replace(gpu_inputs.evaluation, baselines=(), unavailable={"baselines": why})
        report = build_report(replace(gpu_inputs, evaluation=record), {})
        said = findings_by_code(report).get("no-baseline")
        assert (said is not None) is is_missed
        sentence = f"No answer without a model was compared with it: {why}."
        assert (sentence in report.verdict.sentence) is is_missed
        assert report.verdict.learned == "yes"
        if said:
            assert said.severity == "warning" and why in said.evidence


@pytest.mark.parametrize(
    ("plan", "training", "speaks"),
    [
        ({}, {}, False),
        ({"load_best_model_at_end": True}, {}, True),
        ({"patience": 2}, {}, True),
        ({}, {"published_step": 300}, True),
        ({"patience": 2}, {"n_points": 2}, False),  # one loss is no choice
    ],
)
def test_a_loss_that_also_chose_the_weights(
    plan: dict[str, Any], training: dict[str, Any], speaks: bool, cpu_inputs: ReportInputs
) -> None:
    done = cpu_inputs.training
    points = done.eval_points[: training.pop("n_points", 3)]
    inputs = replace(
        cpu_inputs,
        plan=replace(cpu_inputs.plan, **plan),
        training=replace(done, eval_points=points, **training),
        evaluation=made_up.make_bare(before=6.2, after=2.11),
    )
    report = build_report(inputs, {})
    said = findings_by_code(report).get("chosen-by-held-out-loss")
    assert (said is not None) is speaks
    assert (SPOILT in report.verdict.sentence) is speaks
    if said:
        assert said.severity == "info"
        assert all(f"training.{name}" in said.evidence for name in plan)


def test_kept_checkpoints_that_nobody_compared(gpu_report: Report) -> None:
    why = "the weights that training published: 7 held-out questions are left to choose by"
    kept = "training_report.training.n_candidates"
    report = changed(gpu_report, {
        "evaluation.published.candidates": [], "evaluation.published.reason": why, kept: 3,
    })  # fmt: skip
    said = findings_by_code(report)["checkpoints-not-compared"]
    assert said.severity == "info" and "3 checkpoints" in said.evidence
    assert why in said.evidence
    for other in (
        gpu_report,
        changed(report, {kept: 1}),
        changed(report, {"evaluation.metric": None}),
    ):
        assert "checkpoints-not-compared" not in findings_by_code(other)
