"""What was learned: verdicts, findings at, below and above limits, and the page on evaluation."""

import html
import math
import re
from pathlib import Path
from typing import Any

import made_up_evaluation as made_up
import pytest
from made_up_runs import CPU, GPU
from msgspec.structs import replace
from report_reading import changed, findings_by_code, section

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report import learned
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.compare import build_index, index_row, render_index
from expertflow.report.headline import make_tiles
from expertflow.report.learned import judge_run as verdict
from expertflow.report.page import render_page
from expertflow.report.records import Finding, Report
from expertflow.report.summary import summary_rows

SAME: Any = "no measurable change"
DONE = GPU.inputs.evaluation
SIDES: Any = {"before": (0, 6.2), "after": (37, 2.11)}


def _with_metric(**change: Any) -> Report:
    return changed(GPU.report, {f"evaluation.changes.1.{k}": v for k, v in change.items()})


def _of(evaluation: EvaluationRecord) -> dict[str, Finding]:
    return findings_by_code(CPU.report_with(evaluation=evaluation))


def test_the_paired_change_decides() -> None:
    assert verdict(GPU.report).learned == "yes"
    assert "(+56.5 points, 95 % interval +49.7 to +63.3)" in verdict(GPU.report).sentence
    unclear = verdict(_with_metric(difference=0.01, ci95=[-0.01, 0.03], change=SAME))
    assert (unclear.level, unclear.learned) == ("mixed", "unclear")
    assert "no measurable change (+1.0 points, 95 % interval" in unclear.sentence
    assert "Held-out loss fell from 1.874 to 0.566" in unclear.sentence
    leaked = changed(GPU.report, {"evaluation.documents_shared_with_training": 1})
    assert verdict(leaked).learned == "unclear"
    worse = verdict(_with_metric(difference=-0.15, ci95=[-0.2, -0.1], change="worse"))
    assert (worse.level, worse.learned) == ("bad", "no")
    assert "Execution accuracy fell" in worse.sentence


@pytest.mark.parametrize(
    ("n_correct", "level", "answer", "said"),
    [
        (20, "good", "yes", "It beats the best answer without a model (constant, 10.0 %)"),
        (40, "mixed", "unclear", "does not measurably beat answering without a model (constant,"),
        (60, "bad", "no", "It is worse than answering without a model (constant, 30.0 %)"),
    ],
)
def test_a_baseline_decides_the_verdict(n_correct: int, level: str, answer: str, said: str) -> None:
    baselines = {"nearest": 3, "constant": n_correct}
    record = made_up.make_evaluation(**SIDES, baselines=baselines)
    found = CPU.report_with(evaluation=record).verdict
    assert (found.level, found.learned) == (level, answer)
    assert said in found.sentence
    assert "Execution accuracy rose from 0.0 % to 18.5 %" in found.sentence


def test_the_loss_decides() -> None:
    bare = made_up.make_bare(before=1.874, after=0.566)
    one = replace(bare, changes=(), unavailable={"changes": "there is one document only"})
    for record, answer, said in (
        (bare, "yes", "Held-out loss fell from 1.874 to 0.566 nats a token on 200 held-out doc"),
        (made_up.make_bare(before=1.874, after=1.88), "unclear",
         "1.880 nats a token on 200 held-out documents: no measurable change"),
        (one, "unclear", "There is one document only. Held-out loss went from 1.874"),
    ):  # fmt: skip
        found = CPU.report_with(evaluation=record).verdict
        assert found.learned == answer and said in found.sentence


def test_an_unscored_task_is_not_answered_for_by_its_loss() -> None:
    why = "Node is not installed"
    report = CPU.report_with(evaluation=made_up.not_scored(CPU.inputs.evaluation, why))
    assert (report.verdict.level, report.verdict.learned) == ("mixed", "unclear")
    assert f"The task was not scored: {why}. Held-out loss fell" in report.verdict.sentence
    said = findings_by_code(report)
    assert why in said["task-not-scored"].evidence and "no-baseline" not in said


def test_more_questions_by_hand() -> None:
    """A standard error of 2 points at 100 questions; 1 point is seen in 80 % at 2.8 of them."""
    change = made_up.change("loss", 0.01, half=1.959964 * 0.02, n=100, word=SAME)
    needed = 100 * (2.801585 * 0.02 / 0.01) ** 2
    assert learned.n_more_to_see(change) == math.ceil(needed) - 100
    # Half the difference takes four times the questions, in all.
    smaller = replace(change, difference=-0.005)
    assert learned.n_more_to_see(smaller) == math.ceil(4 * needed) - 100
    assert learned.n_more_to_see(replace(change, difference=0.0)) is None


def test_the_best_baseline_is_the_one_that_scores_highest() -> None:
    best = learned.best_baseline(GPU.report.evaluation)
    assert best is not None and best.name == "nearest"
    # Of equals, the one that the expert beats least surely.
    place = "evaluation.baselines"
    equal = {f"{place}.0.value_fraction": best.value_fraction, f"{place}.0.change.ci95": [0.1, 0.5]}
    first = learned.best_baseline(changed(GPU.report, equal).evaluation)
    assert first is not None and first.name == "constant"
    keys = [f"{place}.{i}.{key}" for i in range(3) for key in ("value_fraction", "change")]
    unscored = changed(GPU.report, dict.fromkeys(keys))
    assert learned.best_baseline(unscored.evaluation) is None
    assert "no-baseline" in findings_by_code(unscored)


def test_regression() -> None:
    word: Any
    for difference, word in ((-0.03, SAME), (0.08, "better"), (-0.08, "worse")):
        earlier = made_up.earlier(difference, word)
        found = _of(replace(CPU.inputs.evaluation, earlier=earlier)).get("regression")
        assert (found is not None) is (word == "worse")
    assert found is not None and found.severity == "problem"
    assert "2026-05-30" in found.evidence and "6b6b6b6b6b6b" in found.recommendation


@pytest.mark.parametrize(
    ("n_correct", "severity"), [(26, None), (27, "warning"), (47, "warning"), (48, "problem")]
)
def test_baseline_unbeaten(n_correct: int, severity: str | None) -> None:
    baselines = {"nearest": 1, "constant": n_correct}
    said = _of(made_up.make_evaluation(**SIDES, baselines=baselines)).get("baseline-not-beaten")
    assert (said.severity if said else None) == severity
    if said:
        assert "(constant, " in said.evidence
        assert "gives the most common answer; from 4,000 training documents" in said.recommendation
        assert ("more held-out questions" in said.recommendation) is (severity == "warning")


def test_no_change_says_what_would_show_one() -> None:
    assert "no-measurable-change" not in findings_by_code(GPU.report)
    for difference, low, said in (
        (0.02, -0.02, "about 720 more held-out questions (evaluation.max_examples"),
        (0.0, -0.02, "no number of questions shows a difference of zero"),
        (0.03, 0.01, "so few answers differ"),
    ):
        report = _with_metric(difference=difference, ci95=[low, 0.06], n=100, change=SAME)
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
def test_a_checkpoint(step: int, last_loss: float, said: str | None) -> None:
    place = "evaluation.published"
    changes: dict[str, Any] = {
        f"{place}.candidates.{i}.published": kept == step
        for i, kept in enumerate((600, 1200, 1800))
    }
    changes |= {f"{place}.step": step, f"{place}.candidates.2.held_out_loss": last_loss}
    found = findings_by_code(changed(GPU.report, changes)).get("another-checkpoint")
    assert (found is None) is (said is None)
    if found:
        assert found.severity == "info" and str(said) in found.evidence


def test_a_judge_that_sees_it_otherwise() -> None:
    loss, metric = DONE.changes
    word: Any
    for wins, losses, word, speaks in (
        (31, 7, "better", False), (7, 31, "better", True), (31, 7, "worse", True),
        (20, 20, "worse", False), (7, 31, SAME, False),
    ):  # fmt: skip
        judge = made_up.judge(n_wins=wins, n_losses=losses, n_ties=10)
        record = replace(DONE, judge=judge, changes=(loss, replace(metric, change=word)))
        assert ("judge-disagrees" in _of(record)) is speaks


def test_a_judge_that_goes_by_position_or_gives_no_verdict() -> None:
    for n_unsure, is_odd in ((16, False), (17, True)):
        judge = made_up.judge(n_wins=20, n_losses=10, n_ties=20, n_inconsistent=n_unsure)
        found = _of(replace(DONE, judge=judge))
        assert ("judge-inconsistent" in found) is is_odd
    assert "1 of 51 pairs got no verdict: no verdict in the" in found["judge-failed"].evidence
    judge = replace(judge, n_pairs=50, n_failed=0, reason=None)
    assert "judge-failed" not in _of(replace(DONE, judge=judge))


def test_nothing_is_found_of_an_expert_without_a_task() -> None:
    found = _of(made_up.make_bare(before=2.1, after=2.09))
    assert "held out loss: no measurable change" in found["no-measurable-change"].evidence
    of_a_task = {"regression", "task-not-scored", "baseline-not-beaten", "no-measurable-change",
                 "answers-cut-off", "one-kind-of-error", "questions-shared", "judge-disagrees",
                 "judge-inconsistent", "judge-failed", "no-baseline", "chosen-by-held-out-loss",
                 "questions-not-asked", "checkpoints-not-compared"}  # fmt: skip
    assert not of_a_task & set(_of(made_up.make_bare(before=6.2, after=2.1)))


def test_a_score_without_a_baseline_is_said() -> None:
    few = "too few training questions to learn one from"
    for why, is_missed in ((few, True), ("evaluation.baselines is false", False)):
        report = GPU.report_with(evaluation={"baselines": (), "unavailable": {"baselines": why}})
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
        # One loss is no choice.
        ({"patience": 2}, {"eval_points": CPU.inputs.training.eval_points[:2]}, False),
    ],
)
def test_a_loss_that_also_chose_the_weights(plan: Any, training: Any, speaks: bool) -> None:
    bare = made_up.make_bare(before=6.2, after=2.11)
    report = CPU.report_with(plan=plan, training=training, evaluation=bare)
    said = findings_by_code(report).get("chosen-by-held-out-loss")
    assert (said is not None) is speaks
    assert ("so the change is optimistic" in report.verdict.sentence) is speaks
    if said:
        assert said.severity == "info"
        assert all(f"training.{name}" in said.evidence for name in plan)


def test_kept_checkpoints_that_nobody_compared() -> None:
    why = "the weights that training published: 7 held-out questions are left to choose by"
    kept, published = "training_report.training.n_candidates", "evaluation.published"
    changes = {f"{published}.candidates": [], f"{published}.reason": why, kept: 3}
    report = changed(GPU.report, changes)
    said = findings_by_code(report)["checkpoints-not-compared"]
    assert said.severity == "info" and "3 checkpoints" in said.evidence and why in said.evidence
    one, loss_only = changed(report, {kept: 1}), changed(report, {"evaluation.metric": None})
    for other in (GPU.report, one, loss_only):
        assert "checkpoints-not-compared" not in findings_by_code(other)


def _report(evaluation: EvaluationRecord) -> tuple[Report, str]:
    """Return the report of an evaluation, and its section on the page."""
    step = GPU.inputs.export.published_step
    published = replace(evaluation.published, step=step, candidates=())
    inputs = replace(GPU.short, evaluation=replace(evaluation, published=published))
    report = build_report(inputs, {})
    check_report(report, inputs)
    return report, render_page(report, inputs)


def test_what_was_not_scored_or_is_of_one_document_has_its_reason() -> None:
    why = "Node is not installed"
    record = made_up.not_scored(DONE, why)
    one = {"held_out_loss_ci95": None, "perplexity_ci95": None, "n_documents": 1}
    sides = {name: replace(getattr(record, name), **one) for name in ("before", "after")}
    report, page = _report(replace(record, **sides, changes=()))
    reasons = report.unavailable
    assert reasons["evaluation.after.held_out_loss_ci95"] == "one document has no spread"
    for key in ("after.value_fraction", "before.ci95", "delta.value_fraction", "after.n_cut_off"):
        assert reasons[f"evaluation.{key}"] == why
    shown = section(page, "evaluation")
    assert f"sql execution: {why}" in shown and 'class="range"' not in shown


def test_reasons_of_the_record_are_passed_on() -> None:
    said = {
        "judge": "the endpoint did not answer",
        "baselines": "too few training questions",
        "lm_eval": "evaluation.lm_eval is not set",
        "earlier.change": "another task",
        "before.score.ci95": "too few to say",
        "after.n_cut_off": "options are compared, nothing is generated",
    }
    assert DONE.before.score is not None
    before = replace(DONE.before, score=replace(DONE.before.score, ci95=None))
    blank = {"baselines": (), "judge": None, "lm_eval": (), "earlier": None, "before": before}
    after = replace(DONE.after, n_cut_off=None)
    report, page = _report(replace(DONE, unavailable=said, after=after, **blank))
    reasons = report.unavailable
    assert reasons["evaluation.judge"] == said["judge"]
    assert reasons["evaluation.before.ci95"] == said["before.score.ci95"]
    assert reasons["evaluation.after.n_cut_off"] == said["after.n_cut_off"]
    shown = section(page, "evaluation")
    assert "judge (the endpoint did not answer)" in shown
    assert "baselines (too few training questions)" in shown
    assert "is not set" not in shown  # nobody asked for it


def _answers(page: str) -> dict[str, str]:
    table = page.split("What follows from it")[1].split("</table>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", table)
    return {label: text.replace("\u00a0", " ").replace("&nbsp;", " ") for label, text in rows}


def test_the_page_answers_first() -> None:
    answers = _answers(GPU.page)
    for label, said in (
        ("Against the untrained model",
         '<i class="key good"></i> Better: +56.5 points (+49.7 to +63.3)'),
        ("Against answers without a model, at best nearest", "Better: +30.0 points"),
        ("Against the earlier evaluation", '"key same"></i> No measurable difference'),
        ("Published weights", "Step 1,200 of 1,800"),
        ("What goes wrong, 78 of 200", "Wrong result 63, syntax error 15"),
        ("What goes wrong, 78 of 200", "3 answers cut off before the end"),
    ):  # fmt: skip
        assert said in answers[label]
    # An earlier run of other questions says so.
    earlier = made_up.earlier(0.0, SAME)
    earlier = replace(earlier, n_shared_questions=0, value_fraction=None, change=None)
    said = _answers(_report(replace(DONE, earlier=earlier))[1])["Against the earlier evaluation"]
    assert said.startswith("None of the earlier questions was asked again")


def test_the_page_shows_what_was_compared() -> None:
    page = section(GPU.page, "evaluation")
    for text in (
        "constant", "template", "nearest", "Without a model",
        "Gives the most common answer; from 4,000 training documents", "learnt from training",
        "Kept checkpoints", "published",
        "By a judge", "judge-70b", "31 preferred, 7 not, 12 ties", "arc_easy", "sqlite 3.46.1",
        "greedy", "3 ask what is also trained on",
    ):  # fmt: skip
        assert text in page, text
    assert page.count('<i class="dot"') == 2 + 3 + 1
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    drawn = {f"evaluation.decoding.{key}": value for key, value in drawn.items()}
    page = html.unescape(render_page(changed(GPU.report, drawn), GPU.short))
    assert "temperature 0.7, top-p 0.9, top-k 40, stopped at ';\\n\\n', scored with" in page


def test_ten_worst_answers_and_right_ones() -> None:
    page = section(GPU.page, "samples")
    assert page.count('class="sample"') == 10 + 1
    assert "7 more" in page and "Right answers" in page
    first = page.split("<details>")[0]
    assert first.count('class="sample"') == 3
    assert "row 1 is (&#39;Ada&#39;, 310.0)" in first and "wrong result" in first


def test_with_a_loss_alone_nothing_else_is_shown_and_all_say_what_is_beyond_chance() -> None:
    bare, page = _report(made_up.make_bare(before=6.2, after=2.11))
    shown = section(page, "evaluation")
    for text in ("Without a model", "Kept checkpoints", "judge", "harness", "Answers", "None",
                 "Not measured", "null", "earlier", 'class="na"', 'class="range"'):  # fmt: skip
        assert text not in shown, text
    assert '<section id="samples"' not in page
    assert "Held-out loss" in shown and "6.014 to 6.386" in shown
    assert make_tiles(bare)[0].label == "Perplexity"
    rows = [index_row(GPU.report), index_row(bare)]
    first, second = build_index(rows)["experts"]
    assert first["change"]["change"] == "better" and first["best_baseline"]["name"] == "nearest"
    assert second["change"]["quantity"] == "held_out_loss" and second["best_baseline"] is None
    page = render_index(rows)
    for text in ("better than the untrained model", "better than nearest, without a model",
                 "not measurably different from the earlier evaluation"):  # fmt: skip
        assert text in page
    said, of_bare = (dict(summary_rows(x, html_path=Path("x"))) for x in (GPU.report, bare))
    assert said["change"] == "better: +56.5 points, 95 % interval +49.7 to +63.3"
    assert said["against nearest"].startswith("better: +30.0 points")
    assert said["against earlier"].startswith("no measurable change")
    assert of_bare["change"].startswith("better: \u22124.090 nats a token")
    assert not [label for label in of_bare if label.startswith("against")]
