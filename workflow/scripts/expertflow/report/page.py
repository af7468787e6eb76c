"""Render report.html: one file that needs no network, no script, and no second look at the data.

Texts from data sets, models and manifests are hostile until escaped: the templates escape all of
them. Only the charts are trusted; they hold numbers and texts of this package.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from expertflow.report import format as f
from expertflow.report import view, view_chain, view_hardware, view_plan
from expertflow.report.chart_data import chart_data
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]

N_SAMPLES = 6
N_EPOCHS = 8
N_ROWS = 60  # longer tables end with a hint at report.json
N_CHARS = 1_600
MAX_PAGE_BYTES = 400_000


@cache
def templates() -> Environment:
    """Open the templates beside this module, with escaping on for all of them."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("count", "number_of", "short", "percent", "tenths", "points", "loss", "usd",
             "duration", "size", "energy", "words", "plain", "signed", "sentence", "hold", "hours",
             "short_hash", "signed_percent")  # fmt: skip
    environment.filters |= {name: getattr(f, name) for name in names}
    environment.filters["clip"] = lambda text: f.clip(str(text), N_CHARS)
    return environment


def render_page(report: Report, inputs: ReportInputs) -> str:
    """Render the report with its charts; the series for them come from the inputs."""
    from expertflow.report import charts  # loads altair, which takes a second

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
            hardware_rows=view_hardware.rows(report),
            plan_rows=view_plan.plan_rows(report),
            memory=view_plan.memory(report),
            options=view_plan.options(report),
            chain=view_chain.chain_rows(report["provenance"]["chain"]),
            cell=lambda path, show="plain", blank=view.NOT_MEASURED: view.cell(
                report, path, getattr(f, show), blank=blank
            ),
            kinds=_kinds(evaluation),
            samples=evaluation["samples"][:N_SAMPLES],
            n_samples=len(evaluation["samples"]),
            pieces=_pieces,
            epochs=_ends(training["epoch_summaries"]),
            settings=list(report["training_parameters"].items()),
            machine=view_hardware.machine(report),
            provenance=_flat(_without(report["provenance"], "chain", "input_sha256", "versions"))[
                :N_ROWS
            ],
            n_rows=N_ROWS,
            loss_chart=_trusted(charts.loss_chart(data)),
            timeline=[_trusted(chart) for chart in charts.timeline_charts(data)],
            timeline_data=data.timeline,
            length_chart=_trusted(charts.length_chart(data)),
            cuts=data.lengths.cuts,
        )
    )


def style() -> Markup:
    """Read the style sheet that all pages carry inside."""
    return Markup(Path(__file__).with_name("style.css").read_text(encoding="utf-8"))


def _trusted(chart: Any) -> dict[str, Any] | None:
    if chart is None:
        return None
    return {
        "title": chart.title,
        "unit": chart.unit,
        "wide": Markup(chart.wide),
        "narrow": Markup(chart.narrow),
        "note": chart.note,
    }


def _ends(epochs: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Give the first and last epochs with their places; the middle of many says little."""
    numbered = list(enumerate(epochs))
    return numbered if len(numbered) <= N_EPOCHS else [*numbered[:3], *numbered[3 - N_EPOCHS :]]


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _pieces(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Shorten the stretches of a decoded document: the ends of long ones say most."""
    return [{**piece, "text": _middle_out(piece["text"])} for piece in sample["pieces"]]


def _middle_out(text: str) -> str:
    if len(text) <= N_CHARS:
        return text
    half = N_CHARS // 2
    return f"{text[:half]} […] {text[-half:]}"


def _kinds(evaluation: dict[str, Any]) -> list[tuple[str, int, int]]:
    """List the kinds of verdicts with their counts before and after, correct ones first."""
    before = evaluation["before"]["n_by_kind"] or {}
    after = evaluation["after"]["n_by_kind"] or {}
    names = sorted({*before, *after}, key=lambda name: (name != "correct", name))
    return [(name, before.get(name, 0), after.get(name, 0)) for name in names]


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
