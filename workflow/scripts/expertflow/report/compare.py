"""Compare several experts: results/index.json, and the same facts as a page."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from expertflow.report import format as f
from expertflow.report.learned import BETTER, NO_CHANGE, WORSE, best_baseline, deciding_change
from expertflow.report.measured import is_measured, to_plain
from expertflow.report.records import Report
from expertflow.report.sheet import render

# Incremented when a key of a row changes its meaning.
INDEX_VERSION = 4
COLORS = {BETTER: "good", WORSE: "bad", NO_CHANGE: "mixed"}
IndexRow = dict[str, Any]


def index_row(report: Report) -> IndexRow:
    """Return an expert's facts; only figures that a reader would miss have their reasons."""
    run, model, evaluation = report.run, report.model, report.evaluation
    before, after = evaluation.before, evaluation.after
    best, earlier = best_baseline(evaluation), evaluation.earlier
    wall = next(row for row in report.plan_against_actual if row.quantity == "Wall time")
    return {
        "expert": run.expert,
        "preset": run.preset,
        "simulated": run.simulated,
        "model": model.name,
        "method": model.method,
        "license": model.license,
        "task": evaluation.task,
        "metric": evaluation.metric or None,
        "verdict": report.verdict,
        "before_fraction": before.value_fraction,
        "before_ci95": before.ci95 or None,
        "after_fraction": after.value_fraction,
        "after_ci95": after.ci95 or None,
        "change": deciding_change(evaluation),
        "best_baseline": best
        and {key: getattr(best, key) for key in ("name", "value_fraction", "ci95", "change")},
        "earlier_change": (earlier.change or None) if earlier else None,
        "n_examples": after.n_examples if is_measured(after.n_examples) else None,
        "held_out_loss_before": before.held_out_loss,
        "held_out_loss_after": after.held_out_loss,
        "wall_s": report.time.wall_s,
        "useful_tokens_per_s": report.throughput.useful_tokens_per_s,
        "mfu_fraction": report.throughput.mfu_fraction,
        "usd": report.cost.billed_usd,
        "hours_difference_fraction": wall.difference_fraction,
        "n_findings": len(report.findings),
        "n_bars_failed": sum(bar.verdict == "fail" for bar in report.acceptance),
        "source_licenses": sorted({x.license or "not stated" for x in report.data.sources}),
    }


def build_index(rows: list[IndexRow]) -> dict[str, Any]:
    experts = []
    for row in rows:
        plain, nulls = to_plain(row)
        experts.append(plain | {"unavailable": {key: why for key, why in nulls.items() if why}})
    return {"schema_version": INDEX_VERSION, "experts": experts}


def render_index(rows: list[IndexRow], pages: Sequence[str]) -> str:
    """Render the page that links to the experts' own pages.

    Experts with the same name are distinguished by the folders of their pages, unless equal.
    """
    experts = [row["expert"] for row in rows]
    # ../b/results/expert-sql/report.html -> ../b/results/expert-sql
    folders = [str(PurePath(page).parent) for page in pages]
    names = [
        name if name == folder or experts.count(name) == 1 else f"{name} ({folder})"
        for name, folder in zip(experts, folders, strict=True)
    ]
    rows = [
        # A # or ? in a folder's name would end the path of the link.
        {**row, "name": name, "page": quote(page)}
        for row, name, page in zip(rows, names, pages, strict=True)
    ]
    learned = sum(row["verdict"].learned == "yes" for row in rows)
    prices = [row["usd"] for row in rows if is_measured(row["usd"])]
    wall = f.duration(sum(row["wall_s"] for row in rows))
    # A sum without the experts that have no price would be too low.
    cost = f", for {f.usd(sum(prices))}" if rows and len(prices) == len(rows) else ""
    sentence = f"{learned} of {len(rows)} learned their task, in {wall} of training{cost}."
    return render("index.html.j2", rows=rows, sentence=sentence, colors=COLORS)
