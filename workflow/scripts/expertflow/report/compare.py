"""Lay several experts side by side: results/index.json, and the same facts as a page."""

from typing import Any

from expertflow.report import format as f
from expertflow.report.diagnose import look_up
from expertflow.report.learned import NO_CHANGE, best_baseline, deciding_change
from expertflow.report.sheet import style, templates
from expertflow.report.view import report as view
from expertflow.report.view.evaluation import COLOURS

Report = dict[str, Any]

SCHEMA_VERSION = 3
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
    "licence": "model.licence",
}


def build_index(reports: list[Report]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "experts": [_row(report) for report in reports]}


def _row(report: Report) -> dict[str, Any]:
    run, evaluation, reasons = report["run"], report["evaluation"], report["unavailable"]
    before, after, delta = evaluation["before"], evaluation["after"], evaluation["delta"]
    figures = {name: look_up(report, path) for name, path in FIGURES.items()}
    return {
        "expert": run["expert"],
        "run_id": run["id"],
        "description": run["description"],
        "preset": run["preset"],
        "simulated": run["simulated"],
        "model": report["model"]["name"],
        "method": report["model"]["method"],
        "task": evaluation["task"],
        "metric": evaluation["metric"],
        "verdict": report["verdict"],
        **figures,
        "before_ci95": before["ci95"],
        "after_ci95": after["ci95"],
        "delta_ci95": delta["ci95"],
        **_shown(evaluation),
        "n_examples": after["n_examples"],
        "held_out_loss_before": before["held_out_loss"],
        "held_out_loss_after": after["held_out_loss"],
        "wall_s": report["time"]["wall_s"],
        "hours_difference_fraction": _difference(report["cost"]["hours"], figures["planned_hours"]),
        "n_findings": len(report["findings"]),
        "n_bars_failed": sum(item["verdict"] == "fail" for item in report["acceptance"]),
        "source_licences": _licences(report["data"]["sources"]),
        "unavailable": {name: reasons[path] for name, path in FIGURES.items() if path in reasons},
    }


def _shown(evaluation: dict[str, Any]) -> dict[str, Any]:
    change, best = deciding_change(evaluation), best_baseline(evaluation)
    earlier = evaluation["earlier"]
    return {
        "change": change,
        "best_baseline": best
        and {key: best[key] for key in ("name", "value_fraction", "ci95", "change")},
        "earlier_change": earlier and earlier["change"],
        "published_step": evaluation["published"]["step"],
    }


def _difference(actual: float, planned: float | None) -> float | None:
    return actual / planned - 1 if planned else None


def _licences(sources: list[dict[str, Any]]) -> list[str]:
    return sorted({source["licence"] or "not stated" for source in sources})


def render_index(index: dict[str, Any]) -> str:
    rows = index["experts"]
    return (
        templates()
        .get_template("index.html.j2")
        .render(style=style(), rows=rows, cell=_cell, sentence=_sentence(rows), marks=_marks)
    )


def _cell(row: dict[str, Any], name: str, show: str) -> view.Cell:
    if row[name] is None:
        reason = row["unavailable"].get(name, "no reason was recorded")
        return view.Cell(text=view.NOT_MEASURED, reason=reason)
    return view.Cell(text=getattr(f, show)(row[name]))


def _marks(row: dict[str, Any]) -> list[tuple[str, str]]:
    best = row["best_baseline"]
    named = [("the untrained model", row["change"])]
    if best is not None:
        named.append((f"{best['name']}, without a model", best["change"]))
    marks = [
        (COLOURS[change["change"]], _mark(change["change"], other))
        for other, change in named
        if change is not None
    ]
    earlier = row["earlier_change"]
    if earlier is not None:
        level = "same" if earlier["change"] == NO_CHANGE else COLOURS[earlier["change"]]
        marks.append((level, _mark(earlier["change"], "the earlier evaluation")))
    return marks


def _mark(word: str, other: str) -> str:
    if word == NO_CHANGE:
        return f"not measurably different from {other}"
    return f"{word} than {other}"


def _sentence(rows: list[dict[str, Any]]) -> str:
    learned = sum(row["verdict"]["learned"] == "yes" for row in rows)
    prices = [row["usd"] for row in rows if row["usd"] is not None]
    wall = f.duration(sum(row["wall_s"] for row in rows))
    cost = f", for {f.usd(sum(prices))}" if rows and len(prices) == len(rows) else ""
    return f"{learned} of {len(rows)} learned their task, in {wall} of training{cost}."
