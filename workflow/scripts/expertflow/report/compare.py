"""Compare several experts: results/index.json, and the same facts as a page."""

from typing import Any

from expertflow.report import format as f
from expertflow.report.diagnose import look_up
from expertflow.report.learned import NO_CHANGE, best_baseline, deciding_change
from expertflow.report.measured import NO_REASON
from expertflow.report.sheet import render
from expertflow.report.view import NOT_MEASURED, Cell
from expertflow.report.view_evaluation import COLORS

Report = dict[str, Any]

SCHEMA_VERSION = 3
# Figures that may be missing; an index keeps the report's reason.
FIGURES = {
    "useful_tokens_per_s": "throughput.useful_tokens_per_s",
    "mfu_fraction": "throughput.mfu_fraction",
    "goodput_fraction": "throughput.goodput_fraction",
    "usd": "cost.usd",
    "before_fraction": "evaluation.before.value_fraction",
    "after_fraction": "evaluation.after.value_fraction",
    "delta_fraction": "evaluation.delta.value_fraction",
    "planned_hours": "plan.hours",
    "planned_usd": "plan.usd",
    "license": "model.license",
}
OTHERS = {
    "expert": "run.expert",
    "run_id": "run.id",
    "description": "run.description",
    "preset": "run.preset",
    "simulated": "run.simulated",
    "model": "model.name",
    "method": "model.method",
    "task": "evaluation.task",
    "metric": "evaluation.metric",
    "verdict": "verdict",
    "before_ci95": "evaluation.before.ci95",
    "after_ci95": "evaluation.after.ci95",
    "delta_ci95": "evaluation.delta.ci95",
    "published_step": "evaluation.published.step",
    "n_examples": "evaluation.after.n_examples",
    "held_out_loss_before": "evaluation.before.held_out_loss",
    "held_out_loss_after": "evaluation.after.held_out_loss",
    "wall_s": "time.wall_s",
}


def build_index(reports: list[Report]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "experts": [_row(report) for report in reports]}


def _row(report: Report) -> dict[str, Any]:
    evaluation, reasons = report["evaluation"], report["unavailable"]
    best, earlier = best_baseline(evaluation), evaluation["earlier"]
    planned, sources = report["plan"]["hours"], report["data"]["sources"]
    return {
        **{name: look_up(report, path) for name, path in (OTHERS | FIGURES).items()},
        "change": deciding_change(evaluation),
        "best_baseline": best
        and {key: best[key] for key in ("name", "value_fraction", "ci95", "change")},
        "earlier_change": earlier and earlier["change"],
        "hours_difference_fraction": report["cost"]["hours"] / planned - 1 if planned else None,
        "n_findings": len(report["findings"]),
        "n_bars_failed": sum(item["verdict"] == "fail" for item in report["acceptance"]),
        "source_licenses": sorted({source["license"] or "not stated" for source in sources}),
        "unavailable": {name: reasons[path] for name, path in FIGURES.items() if path in reasons},
    }


def render_index(index: dict[str, Any]) -> str:
    """Render the page that links to each expert's own report (``{expert}/report.html``)."""
    rows = index["experts"]
    learned = sum(row["verdict"]["learned"] == "yes" for row in rows)
    prices = [row["usd"] for row in rows if row["usd"] is not None]
    wall = f.duration(sum(row["wall_s"] for row in rows))
    cost = f", for {f.usd(sum(prices))}" if rows and len(prices) == len(rows) else ""
    sentence = f"{learned} of {len(rows)} learned their task, in {wall} of training{cost}."
    return render("index.html.j2", rows=rows, cell=_cell, sentence=sentence, marks=_marks)


def _cell(row: dict[str, Any], name: str, show: str) -> Cell:
    if row[name] is None:
        return Cell(NOT_MEASURED, row["unavailable"].get(name, NO_REASON))
    return Cell(getattr(f, show)(row[name]))


def _marks(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (color, words) for each comparison: whether it is beyond chance."""
    best, earlier = row["best_baseline"], "the earlier evaluation"
    named = [
        ("the untrained model", row["change"]),
        *([(f"{best['name']}, without a model", best["change"])] if best else []),
        (earlier, row["earlier_change"]),
    ]
    marks = []
    for other, change in named:
        if change is not None:
            word, color = change["change"], COLORS[change["change"]]
            if word == NO_CHANGE and other == earlier:
                color = "same"
            word = "not measurably different from" if word == NO_CHANGE else f"{word} than"
            marks.append((color, f"{word} {other}"))
    return marks
