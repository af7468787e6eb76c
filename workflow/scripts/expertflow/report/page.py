"""Render report.html: one self-contained file, without network access or scripts.

Texts from data sets, models and manifests are untrusted: the templates escape all of them. Only the
charts are trusted; they hold numbers and texts of this package.
"""

from typing import Any, NamedTuple

from expertflow.chain import STAGES
from expertflow.report import format as f
from expertflow.report import view, view_evaluation
from expertflow.report.ablation_page import comparisons
from expertflow.report.charts.data import chart_data
from expertflow.report.inputs import ReportInputs
from expertflow.report.sheet import N_CHARS, N_ROWS, render

Report = dict[str, Any]
Chain = list[dict[str, Any]]

N_EPOCHS = 8
MAX_PAGE_BYTES = 400_000
SHOWN_ELSEWHERE = ("chain", "input_sha256", "versions")
N_HASH = 10
N_RECORDS = 3  # of one stage; report.json has all


def render_page(report: Report, inputs: ReportInputs) -> str:
    from expertflow.report.charts import drawing as charts  # loads altair, which takes a second

    data, evaluation = chart_data(report, inputs), report["evaluation"]
    provenance, timeline = report["provenance"], data.timeline
    facts = {name: value for name, value in provenance.items() if name not in SHOWN_ELSEWHERE}
    epochs = list(enumerate(report["training_report"]["training"]["epoch_summaries"]))
    if len(epochs) > N_EPOCHS:  # the middle of many epochs adds little
        epochs = [*epochs[:3], *epochs[3 - N_EPOCHS :]]

    def cell(path: str, show: str = "plain", blank: str = view.NOT_MEASURED) -> view.Cell:
        return view.cell(report, path, getattr(f, show), blank)

    return render(
        "page.html.j2",
        report=report,
        unavailable=report["unavailable"],
        subject=view.subject(report),
        tiles=view.tiles(report),
        parts=view.time_parts(report),
        split_note=view.split_note(report),
        kernels=view.KERNELS,
        kernel_notes=view.kernel_notes(report) if report["profile"] else [],
        hardware_rows=view.hardware_rows(report),
        shown=view.SHOWN,
        memory=view.memory(report),
        chain=chain_rows(provenance["chain"]),
        cell=cell,
        learned=view_evaluation.learned(report),
        answers=view_evaluation.samples(evaluation),
        shorten=_middle_out,
        epochs=epochs,
        machine=[*view.machine(report), *view.staging(report)],
        provenance=_flat(facts)[:N_ROWS],
        loss_chart=data.loss and charts.loss_chart(data.loss),
        timeline=[charts.panel_chart(p, timeline) for p in timeline.panels] if timeline else [],
        timeline_data=timeline,
        length_chart=charts.length_chart(data.lengths),
        cuts=data.lengths.cuts,
        comparisons=comparisons(report),
    )


def _middle_out(text: str) -> str:
    """Shorten a piece of a decoded document by its middle: the ends matter most."""
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


class Box(NamedTuple):
    """A stage and its records with short hashes; ``n_more`` are not shown."""

    stage: str
    made: list[dict[str, str]]
    n_more: int


class Row(NamedTuple):
    """Boxes side by side; ``link`` names the lines to the row above."""

    boxes: tuple[Box | None, ...]
    link: str


def chain_rows(chain: Chain) -> tuple[Row, ...]:
    """Arrange records in rows of boxes, each made from those above; unknown stages come last."""
    columns: dict[str, list[Box]] = {"documents": [], "tokens": [], "": []}
    others = {item["stage"] for item in chain} - STAGES.keys()
    # Sources are fetched or generated: one box.
    groups = [("fetch_source", "generate_source"), *((name,) for name in list(STAGES)[2:])]
    for names in [*groups, *((name,) for name in sorted(others))]:
        if box := _box(chain, names):
            columns[STAGES[names[0]].side if names[0] in STAGES else ""].append(box)
    left, right, trunk = columns.values()
    placed: list[tuple[Box | None, ...]] = [(box,) for box in (*left, *right, *trunk)]
    if left and right:  # side by side, both connected to packing below
        height = max(len(left), len(right))
        sides = ([*[None] * (height - len(boxes)), *boxes] for boxes in (left, right))
        placed = [*zip(*sides, strict=True), *((box,) for box in trunk)]
    above = [(), *placed]
    return tuple(Row(b, _link(a, b)) for a, b in zip(above, placed, strict=False))


def _box(chain: Chain, stages: tuple[str, ...]) -> Box | None:
    found = [item for item in chain if item["stage"] in stages]
    if not found:
        return None
    made = [
        {"record": item["record"], **{k: (item[k] or "")[:N_HASH] for k in ("sha256", "code")}}
        for item in found[:N_RECORDS]
    ]
    names = ", ".join(dict.fromkeys(item["stage"] for item in found))
    return Box(names, made, max(0, len(found) - N_RECORDS))


def _link(above: tuple[Box | None, ...], boxes: tuple[Box | None, ...]) -> str:
    if not above or len(above) == len(boxes) == 1:
        return "straight" if above else ""
    if len(boxes) == 1:
        return "join" if all(above) else "left" if above[0] else "right"
    lines = [name for name, a, b in zip(("left", "right"), above, boxes, strict=True) if a and b]
    right = STAGES.get(boxes[1].stage) if boxes[1] else None
    if above[0] and right and above[0].stage in right.reads.split():
        lines.append("elbow")
    return " ".join(lines)
