"""What was learned: verdicts, findings at, below and above limits, and the page on evaluation."""

import html
import re
from typing import Any

import made_up_evaluation as made_up
import pytest
from made_up_runs import CPU, GPU
from msgspec.structs import replace
from planted_runs import losses
from report_reading import (
    changed,
    compare_with_golden,
    findings_by_code,
    index_page,
    lines_of,
    section,
)

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report import learned
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.compare import build_index, index_row
from expertflow.report.headline import make_tiles
from expertflow.report.learned import judge_run as verdict
from expertflow.report.page import render_page
from expertflow.report.records import Report

SAME: Any = "no measurable change"
DONE = GPU.inputs.evaluation
SIDES: Any = {"before": (0, 6.2), "after": (37, 2.11)}


def _with_metric(**change: Any) -> Report:
    return changed(GPU.report, {f"evaluation.changes.1.{k}": v for k, v in change.items()})


def test_the_paired_change_decides() -> None:
    assert verdict(GPU.report).learned == "yes"
    assert "(+56.5 points, 95 % interval +49.7 to +63.3)" in verdict(GPU.report).sentence
    unclear = verdict(_with_metric(difference=0.01, ci95=[-0.01, 0.03], change=SAME))
    assert (unclear.level, unclear.learned) == ("mixed", "unclear")
    assert "no measurable change (+1.0 points, 95 % interval" in unclear.sentence
    assert "Held-out loss fell from 1.874 to 0.566" in unclear.sentence
    for difference, why in ((0.025, "too few of the 200"), (0.03, "too few groups of the 200")):
        found = verdict(_with_metric(difference=difference, ci95=[0.01, 0.04], change=SAME))
        assert f"{why} differ to be conclusive" in found.sentence
    nearest = {"difference": -0.02, "ci95": (-0.04, -0.01), "change": SAME}
    place = "evaluation.baselines.2"
    named = {f"{place}.change.{k}": v for k, v in nearest.items()} | {f"{place}.name": "in_words"}
    few = changed(GPU.report, named)
    page = render_page(few, GPU.short)
    for text in (verdict(few).sentence, page):
        assert "too few of the 200 differ" in text
    texts = (verdict(few).sentence, page, index_page(few))
    assert not [text for text in texts if "in_words" in text]
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
    for record, answer, said in (
        (bare, "yes", "Held-out loss fell from 1.874 to 0.566 nats per token on 200 held-out doc"),
        (made_up.make_bare(before=1.874, after=1.88), "unclear",
         "1.880 nats per token on 200 held-out documents: no measurable change"),
        (made_up.not_scored(CPU.inputs.evaluation, "no Node"), "unclear",
         "The task was not scored: no Node. Held-out loss fell"),
    ):  # fmt: skip
        found = CPU.report_with(evaluation=record).verdict
        assert found.learned == answer and said in found.sentence


def test_a_continued_adapter_is_not_credited_with_what_it_had_learned() -> None:
    points = GPU.report.training_report.training.eval_points
    continued = verdict(changed(GPU.report, {"model.lora.init_from": "adapter"}))
    assert f"continued an adapter, from a loss of {points[0].loss:.3f}." in continued.sentence
    assert "continued" not in verdict(GPU.report).sentence


@pytest.mark.parametrize(("n", "answer"), [(5, learned.TOO_FEW), (6, "Inconclusive.")])
def test_too_few_held_out_documents_are_reported_as_such(n: int, answer: str) -> None:
    report = _with_metric(difference=0.1, ci95=[-0.1, 0.3], change=SAME)
    few = verdict(changed(report, {"evaluation.held_out_documents": n}))
    assert few.answer == answer
    assert few.sentence.count("At least 6 are needed to show a change") == (n < 6)


def test_the_best_baseline_is_the_one_that_scores_highest() -> None:
    best = learned.best_baseline(GPU.report.evaluation)
    assert best is not None and best.name == "nearest"
    # Of equals, the one that the expert beats least clearly.
    place = "evaluation.baselines"
    equal = {f"{place}.0.value_fraction": best.value_fraction, f"{place}.0.change.ci95": [0.1, 0.5]}
    first = learned.best_baseline(changed(GPU.report, equal).evaluation)
    assert first is not None and first.name == "constant"
    assert "no-baseline" in findings_by_code(changed(GPU.report, {place: []}))


def test_the_verdict_says_what_qualifies_it() -> None:
    bare, few = made_up.make_bare(before=6.2, after=2.11), "too few questions"
    by_loss = {"plan": {"patience": 2}, "evaluation": bare}
    one_choice = {"training": {"eval_points": CPU.inputs.training.eval_points[:2]}}
    unasked = made_up.REASONS | {"baselines": "evaluation.baselines is false"}
    asked = made_up.REASONS | {"baselines": few}
    alone: Any = {"baselines": (), "unavailable": asked}
    for changes, words, is_said in (
        (losses(6.1, 2.0, 1.5, 11.5), "It overfitted: from step 600 to 900", True),
        (losses(6.1, 2.0, 1.5, 1.52), "overfitted", False),
        (by_loss, "so the change is optimistic", True),
        (by_loss | one_choice, "optimistic", False),
        ({"evaluation": alone}, f"It was not compared with answers without a model: {few}.", True),
        ({"evaluation": {**alone, "unavailable": unasked}}, "was compared", False),
    ):
        found = CPU.report_with(**changes).verdict
        assert (words in found.sentence) is is_said, words
        assert found.learned == "yes"


def _report(evaluation: EvaluationRecord) -> tuple[Report, str]:
    """Return the report of an evaluation, and its section on the page."""
    step = GPU.inputs.export.published_step
    published = replace(evaluation.published, step=step, candidates=())
    inputs = replace(GPU.short, evaluation=replace(evaluation, published=published))
    report = build_report(inputs, {})
    check_report(report, inputs)
    return report, render_page(report, inputs)


def test_missing_scores_and_single_documents_have_a_reason() -> None:
    why = "Node is not installed"
    record = made_up.not_scored(DONE, why)
    one = {"held_out_loss_ci95": None, "perplexity_ci95": None, "n_documents": 1}
    sides = {name: replace(getattr(record, name), **one) for name in ("before", "after")}
    few = {f"{name}.{key}": "too few documents" for name in sides for key in one}
    report, page = _report(replace(record, unavailable=record.unavailable | few, **sides))
    reasons = report.unavailable
    assert reasons["evaluation.after.held_out_loss_ci95"] == "too few documents"
    for key in ("after.value_fraction", "before.ci95", "delta.value_fraction", "after.n_cut_off"):
        assert reasons[f"evaluation.{key}"] == why
    shown = section(page, "evaluation")
    assert f"sql execution: {why}" in shown and 'class="range"' not in shown


def test_reasons_of_the_record_are_passed_on() -> None:
    said = {
        "judge": "the endpoint did not answer",
        "baselines": "too few training questions",
        "lm_eval": "evaluation.lm_eval is not set",
        "earlier": "another task",
        "recall": "the extra for graphs is missing",
        "before.score.ci95": "too few to say",
        "after.n_cut_off": "options are compared, nothing is generated",
    }
    assert DONE.before.score is not None
    before = replace(DONE.before, score=replace(DONE.before.score, ci95=None))
    blank = {"baselines": (), "judge": None, "lm_eval": (), "earlier": None, "recall": ()}
    after = replace(DONE.after, n_cut_off=None)
    report, page = _report(replace(DONE, unavailable=said, before=before, after=after, **blank))
    reasons = report.unavailable
    assert reasons["evaluation.judge"] == said["judge"]
    assert reasons["evaluation.before.ci95"] == said["before.score.ci95"]
    assert reasons["evaluation.after.n_cut_off"] == said["after.n_cut_off"]
    shown = section(page, "evaluation")
    assert "judge (the endpoint did not answer)" in shown
    assert "baselines (too few training questions)" in shown
    assert "is not set" not in shown  # not requested
    assert _answers(page)["Training questions"] == "The extra for graphs is missing"


def _answers(page: str) -> dict[str, str]:
    table = page.split("Conclusions")[1].split("</table>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", table)
    return {label: text.replace("\u00a0", " ").replace("&nbsp;", " ") for label, text in rows}


def test_the_page_states_what_was_not_comparable() -> None:
    # Equal differences have no interval.
    same = made_up.change(made_up.METRIC, 0.0, half=0.0, n=made_up.N)
    before = replace(DONE.before, score=DONE.after.score)
    alike = replace(DONE, before=before, changes=(DONE.changes[0], same))
    said = _answers(_report(alike)[1])["Against the untrained model"]
    assert "0.0 points (no interval: all changed equally, or form one group)" in said
    # An earlier run of other questions says so.
    earlier = made_up.earlier(0.0, SAME)
    earlier = replace(earlier, n_shared_questions=0, value_fraction=None, change=None)
    other = dict.fromkeys(
        ("earlier.value_fraction", "earlier.change"),
        "the earlier evaluation asked none of these questions",
    )
    record = replace(DONE, earlier=earlier, unavailable=DONE.unavailable | other)
    said = _answers(_report(record)[1])["Against the earlier evaluation"]
    assert said.startswith("The earlier evaluation asked none of these questions")


def test_the_page_states_how_answers_were_sampled() -> None:
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    drawn = {f"evaluation.decoding.{key}": value for key, value in drawn.items()}
    page = html.unescape(render_page(changed(GPU.report, drawn), GPU.short))
    assert "temperature 0.7, top-p 0.9, top-k 40, stopped at ';\\n\\n', scored with" in page


def test_with_only_a_loss_nothing_else_is_shown_and_significance_is_stated() -> None:
    bare_record = made_up.make_bare(before=6.2, after=2.11)
    bare, page = _report(bare_record)
    shown = section(page, "evaluation")
    compare_with_golden("loss-alone.txt", lines_of(shown))
    assert 'class="na"' not in shown and 'class="range"' not in shown
    assert '<section id="samples"' not in page
    assert make_tiles(bare)[0].label == "Perplexity"
    asked = {"judge": "task held_out_loss generates nothing", "lm_eval": "it is not installed"}
    other = _report(replace(bare_record, unavailable=bare_record.unavailable | asked))[1]
    said = "judge (task held_out_loss generates nothing); lm eval (it is not installed)"
    assert f"Not measured: {said}." in section(other, "evaluation")
    first, second = build_index([index_row(GPU.report), index_row(bare)])["experts"]
    assert first["change"]["change"] == "better" and first["best_baseline"]["name"] == "nearest"
    assert second["change"]["quantity"] == "held_out_loss" and second["best_baseline"] is None
    assert "95 % interval of the change \u2212" in bare.verdict.sentence.replace("\u00a0", " ")
