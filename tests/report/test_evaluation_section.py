"""The evaluation in report.json and on the page: with everything, and with nothing but a loss."""

import html
import re
from pathlib import Path

import made_up_evaluation as made_up
from made_up_runs import GPU
from msgspec.structs import replace
from report_reading import changed, section

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.compare import build_index, index_row, render_index
from expertflow.report.headline import make_tiles
from expertflow.report.page import render_page
from expertflow.report.records import Report
from expertflow.report.summary import summary_rows

DONE = GPU.inputs.evaluation
DRAWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}


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
    earlier = made_up.earlier(0.0, "no measurable change")
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
    drawn = {f"evaluation.decoding.{k}": v for k, v in DRAWN.items()}
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
