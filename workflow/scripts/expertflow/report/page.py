"""Render report.html: one file that needs no network, no script, and no second look at the data.

Texts from data sets, models and manifests are hostile until escaped: the templates escape all of
them. Only the charts are trusted; they hold numbers and texts of this package.
"""

from typing import Any

from expertflow.report import format as f
from expertflow.report.ablation import comparison as view_comparison
from expertflow.report.charts.data import chart_data
from expertflow.report.inputs import ReportInputs
from expertflow.report.sheet import N_CHARS, N_ROWS, style, templates, trusted
from expertflow.report.view import chain as view_chain
from expertflow.report.view import evaluation as view_evaluation
from expertflow.report.view import hardware as view_hardware
from expertflow.report.view import plan as view_plan
from expertflow.report.view import profile as profile_view
from expertflow.report.view import report as view
from expertflow.report.view import staging as view_staging

Report = dict[str, Any]

N_EPOCHS = 8
MAX_PAGE_BYTES = 400_000


def render_page(report: Report, inputs: ReportInputs) -> str:
    from expertflow.report.charts import drawing as charts  # loads altair, which takes a second

    data = chart_data(report, inputs)
    evaluation, training = report["evaluation"], report["training_report"]["training"]
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            report=report,
            unavailable=report["unavailable"],
            unavailable_rows=list(report["unavailable"].items())[:N_ROWS],
            style=style(),
            subject=view.subject(report),
            preset_note=view.preset_note(report),
            tiles=view.tiles(report),
            parts=view.time_parts(report),
            split_note=view.split_note(report),
            kernels=profile_view.kernels(report),
            hardware_rows=view_hardware.rows(report),
            plan_rows=view_plan.plan_rows(report),
            memory=view_plan.memory(report),
            options=view_plan.options(report),
            chain=view_chain.chain_rows(report["provenance"]["chain"]),
            cell=lambda path, show="plain", blank=view.NOT_MEASURED: view.cell(
                report, path, getattr(f, show), blank=blank
            ),
            learned=_learned(report),
            answers=view_evaluation.samples(evaluation),
            n_samples=len(evaluation["samples"]),
            pieces=_pieces,
            epochs=_ends(training["epoch_summaries"]),
            settings=list(report["training_parameters"].items()),
            machine=[*view_hardware.machine(report), *view_staging.staging(report)],
            provenance=_flat(_without(report["provenance"], "chain", "input_sha256", "versions"))[
                :N_ROWS
            ],
            n_rows=N_ROWS,
            loss_chart=trusted(charts.loss_chart(data)),
            timeline=[trusted(chart) for chart in charts.timeline_charts(data)],
            timeline_data=data.timeline,
            length_chart=trusted(charts.length_chart(data)),
            cuts=data.lengths.cuts,
            comparisons=view_comparison.comparisons(report),
        )
    )


def _learned(report: Report) -> dict[str, Any]:
    before, after = (report["evaluation"][side]["value_fraction"] for side in ("before", "after"))
    return {
        "is_scored": None not in (before, after),
        "ranges": view_evaluation.ranges(report),
        "lines": view_evaluation.lines(report),
        "rows": view_evaluation.score_rows(report),
        "kinds": view_evaluation.kinds(report["evaluation"]),
        "judge": view_evaluation.judge_text(report),
        "how": view_evaluation.how(report),
        "left_out": view_evaluation.left_out(report),
    }


def _ends(epochs: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    numbered = list(enumerate(epochs))
    return numbered if len(numbered) <= N_EPOCHS else [*numbered[:3], *numbered[3 - N_EPOCHS :]]


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _pieces(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**piece, "text": _middle_out(piece["text"])} for piece in sample["pieces"]]


def _middle_out(text: str) -> str:
    if len(text) <= N_CHARS:
        return text
    half = N_CHARS // 2
    return f"{text[:half]} […] {text[-half:]}"


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in _flat(item, f"{path}.{key}")]
    if isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        return [row for i, item in enumerate(value) for row in _flat(item, f"{path}[{i}]")]
    if isinstance(value, list | tuple):
        return [(path[1:], ", ".join(map(f.plain, value)))]
    if value in (None, {}):
        return [(path[1:], "")]
    is_size = path.endswith("_bytes") and isinstance(value, int | float)
    return [(path[1:], f.size(value) if is_size else f.plain(value))]
