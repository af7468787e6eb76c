"""The evaluation in report.json and on the page: with everything, and with nothing but a loss."""

import html
import re
from pathlib import Path

import made_up_evaluation as made_up
import pytest
from msgspec.structs import replace
from report_reading import changed, section

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.compare import build_index, index_row, render_index
from expertflow.report.headline import make_tiles
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import render_page
from expertflow.report.records import Report
from expertflow.report.summary import summary_rows

PAGE = Path("r/report.html")
DRAWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}


def _report(inputs: ReportInputs, evaluation: EvaluationRecord) -> Report:
    published = replace(evaluation.published, step=inputs.export.published_step, candidates=())
    inputs = replace(inputs, evaluation=replace(evaluation, published=published))
    report = build_report(inputs, {})
    check_report(report, inputs)
    return report


@pytest.fixture(scope="module")
def bare(short_inputs: ReportInputs) -> Report:
    return _report(short_inputs, made_up.make_bare(before=6.2, after=2.11))


def test_what_was_not_scored_or_is_of_one_document_has_its_reason(
    short_inputs: ReportInputs,
) -> None:
    why = "Node is not installed"
    record = made_up.not_scored(short_inputs.evaluation, why)
    one = {"held_out_loss_ci95": None, "perplexity_ci95": None, "n_documents": 1}
    sides = {name: replace(getattr(record, name), **one) for name in ("before", "after")}
    report = _report(short_inputs, replace(record, **sides, changes=()))
    reasons = report.unavailable
    assert reasons["evaluation.after.held_out_loss_ci95"] == "one document has no spread"
    for key in ("after.value_fraction", "before.ci95", "delta.value_fraction", "after.n_cut_off"):
        assert reasons[f"evaluation.{key}"] == why
    page = section(render_page(report, short_inputs), "evaluation")
    assert f"sql execution: {why}" in page and 'class="range"' not in page


def test_reasons_of_the_record_are_passed_on(short_inputs: ReportInputs) -> None:
    said = {
        "judge": "the endpoint did not answer",
        "baselines": "too few training questions",
        "lm_eval": "evaluation.lm_eval is not set",
        "earlier.change": "another task",
        "before.score.ci95": "too few to say",
        "after.n_cut_off": "options are compared, nothing is generated",
    }
    old = short_inputs.evaluation
    assert old.before.score is not None
    evaluation = replace(
        old,
        unavailable=said,
        baselines=(),
        judge=None,
        lm_eval=(),
        earlier=None,
        before=replace(old.before, score=replace(old.before.score, ci95=None)),
        after=replace(old.after, n_cut_off=None),
    )
    report = _report(short_inputs, evaluation)
    reasons = report.unavailable
    assert reasons["evaluation.judge"] == said["judge"]
    assert reasons["evaluation.before.ci95"] == said["before.score.ci95"]
    assert reasons["evaluation.after.n_cut_off"] == said["after.n_cut_off"]
    page = render_page(report, short_inputs)
    shown = section(page, "evaluation")
    assert "judge (the endpoint did not answer)" in shown
    assert "baselines (too few training questions)" in shown
    assert "is not set" not in shown  # nobody asked for it


def _answers(page: str) -> dict[str, str]:
    table = page.split("What follows from it")[1].split("</table>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", table)
    return {label: text.replace("\u00a0", " ").replace("&nbsp;", " ") for label, text in rows}


def test_the_page_answers_first(gpu_page: str) -> None:
    answers = _answers(gpu_page)
    trained = answers["Against the untrained model"]
    assert trained == '<i class="key good"></i> Better: +56.5 points (+49.7 to +63.3)'
    other = answers["Against answers without a model, at best nearest"]
    assert "Better: +30.0 points" in other
    earlier = answers["Against the earlier evaluation"]
    assert '"key same"></i> No measurable difference' in earlier
    assert "Step 1,200 of 1,800" in answers["Published weights"]
    wrong = answers["What goes wrong, 78 of 200"]
    assert wrong.startswith("Wrong result 63, syntax error 15")
    assert "3 answers cut off before the end" in wrong


def test_an_earlier_run_of_other_questions_says_so(short_inputs: ReportInputs) -> None:
    earlier = made_up.earlier(0.0, "no measurable change")
    earlier = replace(earlier, n_shared_questions=0, value_fraction=None, change=None)
    report = _report(short_inputs, replace(short_inputs.evaluation, earlier=earlier))
    said = _answers(render_page(report, short_inputs))["Against the earlier evaluation"]
    assert said.startswith("None of the earlier questions was asked again")


def test_the_page_shows_what_was_compared(
    gpu_report: Report, short_inputs: ReportInputs, gpu_page: str
) -> None:
    page = section(gpu_page, "evaluation")
    for text in (
        "constant", "template", "nearest", "Without a model",
        "Gives the most common answer; from 4,000 training documents", "learnt from training",
        "Kept checkpoints", "published",
        "By a judge", "judge-70b", "31 preferred, 7 not, 12 ties", "arc_easy", "sqlite 3.46.1",
        "greedy", "3 ask what is also trained on",
    ):  # fmt: skip
        assert text in page, text
    assert page.count('<i class="dot"') == 2 + 3 + 1
    drawn = {f"evaluation.decoding.{k}": v for k, v in DRAWN.items()}
    page = html.unescape(render_page(changed(gpu_report, drawn), short_inputs))
    assert "temperature 0.7, top-p 0.9, top-k 40, stopped at ';\\n\\n', scored with" in page


def test_the_page_shows_nothing_that_is_not_there(bare: Report, short_inputs: ReportInputs) -> None:
    page = render_page(bare, short_inputs)
    shown = section(page, "evaluation")
    for text in ("Without a model", "Kept checkpoints", "judge", "harness", "Answers", "None",
                 "Not measured", "null", "earlier", 'class="na"', 'class="range"'):  # fmt: skip
        assert text not in shown, text
    assert '<section id="samples"' not in page
    assert "Held-out loss" in shown and "6.014 to 6.386" in shown
    assert make_tiles(bare)[0].label == "Perplexity"


def test_ten_worst_answers_and_right_ones(gpu_page: str) -> None:
    page = section(gpu_page, "samples")
    assert page.count('class="sample"') == 10 + 1
    assert "7 more" in page and "Right answers" in page
    first = page.split("<details>")[0]
    assert first.count('class="sample"') == 3
    assert "row 1 is (&#39;Ada&#39;, 310.0)" in first and "wrong result" in first


def test_index_and_terminal_say_what_is_beyond_chance(gpu_report: Report, bare: Report) -> None:
    rows = [index_row(gpu_report), index_row(bare)]
    first, second = build_index(rows)["experts"]
    assert first["change"]["change"] == "better" and first["best_baseline"]["name"] == "nearest"
    assert second["change"]["quantity"] == "held_out_loss" and second["best_baseline"] is None
    page = render_index(rows)
    for text in ("better than the untrained model", "better than nearest, without a model",
                 "not measurably different from the earlier evaluation"):  # fmt: skip
        assert text in page
    said = dict(summary_rows(gpu_report, html_path=PAGE))
    assert said["change"] == "better: +56.5 points, 95 % interval +49.7 to +63.3"
    assert said["against nearest"].startswith("better: +30.0 points")
    assert said["against earlier"].startswith("no measurable change")
    said = dict(summary_rows(bare, html_path=PAGE))
    assert said["change"].startswith("better: \u22124.090 nats a token")
    assert not [label for label in said if label.startswith("against")]
