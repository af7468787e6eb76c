"""Render report.html: one file that needs no network, no script, and no second look at the data.

Texts from data sets, models and manifests are hostile until escaped: the templates escape all of
them. Only the charts are trusted; they hold numbers and texts of this package.
"""

from typing import Any

from expertflow.report import format as f
from expertflow.report import view, view_evaluation, view_hardware
from expertflow.report.ablation_page import comparisons
from expertflow.report.charts.data import chart_data
from expertflow.report.inputs import ReportInputs
from expertflow.report.sheet import N_CHARS, N_ROWS, render, trusted
from expertflow.report.view_chain import chain_rows

Report = dict[str, Any]

N_EPOCHS = 8
MAX_PAGE_BYTES = 400_000
SHOWN_ELSEWHERE = ("chain", "input_sha256", "versions")


def render_page(report: Report, inputs: ReportInputs) -> str:
    """Render the report with its charts; the series for them come from the inputs."""
    from expertflow.report.charts import drawing as charts  # loads altair, which takes a second

    data, evaluation = chart_data(report, inputs), report["evaluation"]
    provenance, timeline = report["provenance"], data.timeline
    facts = {name: value for name, value in provenance.items() if name not in SHOWN_ELSEWHERE}

    def cell(path: str, show: str = "plain", blank: str = view.NOT_MEASURED) -> view.Cell:
        return view.cell(report, path, getattr(f, show), blank)

    return render(
        "page.html.j2",
        report=report,
        unavailable=report["unavailable"],
        subject=view.subject(report),
        preset_note=view.preset_note(report),
        tiles=view.tiles(report),
        parts=view.time_parts(report),
        split_note=view.split_note(report),
        kernels=view.KERNELS,
        kernel_notes=view.kernel_notes(report) if report["profile"] else [],
        hardware_rows=view_hardware.rows(report),
        shown=view.SHOWN,
        memory=view.memory(report),
        chain=chain_rows(provenance["chain"]),
        cell=cell,
        learned=view_evaluation.learned(report),
        answers=view_evaluation.samples(evaluation),
        shorten=_middle_out,
        epochs=_ends(report["training_report"]["training"]["epoch_summaries"]),
        machine=[*view_hardware.machine(report), *view_hardware.staging(report)],
        provenance=_flat(facts)[:N_ROWS],
        loss_chart=trusted(charts.loss_chart(data.loss)) if data.loss else None,
        timeline=[trusted(charts.panel_chart(p, timeline)) for p in timeline.panels]
        if timeline
        else [],
        timeline_data=timeline,
        length_chart=trusted(charts.length_chart(data.lengths)),
        cuts=data.lengths.cuts,
        comparisons=comparisons(report),
    )


def _ends(epochs: list[Report]) -> list[tuple[int, Report]]:
    """Return the first and last epochs with their places; the middle of many says little."""
    numbered = list(enumerate(epochs))
    return numbered if len(numbered) <= N_EPOCHS else [*numbered[:3], *numbered[3 - N_EPOCHS :]]


def _middle_out(text: str) -> str:
    """Shorten a stretch of a decoded document: the ends of a long one say most."""
    half = N_CHARS // 2
    return text if len(text) <= N_CHARS else f"{text[:half]} […] {text[-half:]}"


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
