"""report.html: one small file without network or script, and what it lays side by side."""

import html
import re

import report_reading as reading
from made_up_ablation import make_ablation
from made_up_runs import CPU, GPU
from msgspec.structs import replace

from expertflow.core.format import show_hidden
from expertflow.core.records import from_json
from expertflow.report.ablation_page import render_ablation
from expertflow.report.build import build_report
from expertflow.report.charts.frame import _themed
from expertflow.report.measured import restore, to_plain
from expertflow.report.page import render_page
from expertflow.report.records import Report

PLACES = (("evaluation", "time"), ("samples", "findings"), ("timeline", "data"),
          ("plan", "sources"), ("provenance", "footer"))  # fmt: skip


def test_pages_say_what_their_golden_texts_say() -> None:
    """Every text, figure, name of a drawing and reason, in order."""
    pages = {
        "report-gpu": GPU.page,
        "report-cpu": CPU.page,
        "index": reading.index_page(GPU.report, CPU.report),
        "ablation": render_ablation(make_ablation()),
    }
    for name, page in pages.items():
        reading.check_page_is_safe(page)
        assert len(page.encode()) < reading.MAX_PAGE_BYTES / 2
        assert not re.search(">(None|nan|null)<", page)
        drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
        assert not re.findall(r'"#[0-9a-f]{3,6}"', drawings), "colors are those of the theme"
        reading.compare_with_golden(f"{name}.txt", reading.lines_of(page))
    assert "prefers-color-scheme: dark" in GPU.page
    assert render_page(CPU.report, CPU.inputs) == CPU.page


# Schema or templates interpret these texts.
KEPT = {"kind", "level", "learned", "severity", "op", "verdict", "started_at", "preset", "unit",
        "change", "status", "method", "chat_template", "split_source", "origin", "action",
        "merged_into", "class", "confidence", "quantity", "bound"}  # fmt: skip
MAPS = {"n_by_kind", "throttle_s", "temperature_limits_c", "machine", "versions",
        "dropped_by_reason", "rejected_by_reason", "filtered_by_reason"}  # fmt: skip


def _hostile_report(report: Report) -> Report:
    plain, nulls = to_plain(report)
    bill = reading.hostile(plain.pop("bill"), KEPT, set())  # its machine is no map
    report = from_json(Report, {**reading.hostile(plain, KEPT, MAPS), "bill": bill})
    return restore(report, dict.fromkeys(nulls, reading.HOSTILE))


def _escaped(page: str) -> str:
    reading.check_page_is_safe(page)
    assert "&lt;script&gt;" in page and "<script" not in page
    assert "{{ 7 * 7 }}" in page
    assert "&lt;U+202E&gt; &lt;U+001B&gt;[2J" in page
    assert not {"\u202e", "\x1b"} & set(page)
    return page


def test_hostile_texts_are_escaped() -> None:
    hostile_report = _hostile_report(GPU.report)
    _escaped(render_page(_hostile_report(CPU.report), CPU.short))
    few = {"steps": GPU.inputs.steps[:20], "samples": GPU.inputs.samples[:20]}
    page = _escaped(render_page(hostile_report, replace(GPU.inputs, **few)))
    for name, end in PLACES:  # that only a full report has
        part = page.split(f'<section id="{name}"')[1].split(f'id="{end}"')[0]
        assert part.count("&lt;script&gt;") > 3, name
    other = reading.changed(
        GPU.report, {"run.preset": "demo", "data.sources.0.license": reading.HOSTILE}
    )
    _escaped(reading.index_page(hostile_report, other))
    svg = _themed('<svg width="1"><text>a</text></svg>', reading.HOSTILE)
    outline = reading.Outline(svg)
    assert outline.tags == ["svg", "text"]
    assert dict(outline.attributes)["aria-label"] == show_hidden(reading.HOSTILE)


def test_long_texts_and_series_do_not_burst_the_page() -> None:
    evaluation, datasets = GPU.short.evaluation, GPU.short.datasets
    sample = replace(evaluation.samples[0], prompt="<" * 300_000, after="&" * 300_000)
    inputs = replace(
        GPU.short,
        evaluation=replace(evaluation, samples=(sample,) * 50),
        datasets=replace(datasets, sources=datasets.sources[:1] * 3_000),
    )
    page = render_page(build_report(inputs, {}), inputs)
    assert len(page.encode()) < reading.MAX_PAGE_BYTES
    assert "more characters" in page and "more in report.json" in page
    steps, samples = GPU.inputs.steps, GPU.inputs.samples
    inputs = GPU.change(
        steps=tuple(replace(steps[i % 1_800], step=i + 1) for i in range(40_000)),
        samples=tuple(replace(samples[i % 1_000], elapsed_s=float(i)) for i in range(40_000)),
        training={"save_points": GPU.inputs.training.save_points[-1:] * 300},
    )
    page = render_page(GPU.report, inputs)
    assert len(page.encode()) < reading.MAX_PAGE_BYTES
    assert page.count("<figure>") >= 11


def test_every_table_and_drawing_is_named() -> None:
    for page in (GPU.page, CPU.page):
        assert page.count("<table") == page.count("<caption>") > 8
        drawings = re.findall(r"<svg [^>]*>", page)
        assert drawings
        for drawing in drawings:
            label = re.search(r'role="img" aria-label="([^"]*)"', drawing)
            assert label is not None and len(label[1]) > 30, drawing


def test_parts_without_content_are_left_out() -> None:
    report = reading.changed(GPU.report, {
        "plan.options": [], "plan.claims": [], "plan.memory": None, "provenance.chain": [],
    })  # fmt: skip
    page = render_page(report, GPU.short)
    reading.Outline(page)
    for text in ("The same work", "Claims, held", "Device memory", "From sources to report"):
        assert text not in page and text in GPU.page
    assert "No readings were taken." in page and "No readings were taken." not in GPU.page


def _rows(page: str, place: str) -> dict[str, str]:
    """Return the lines of the first table of a section of a page by their first cell."""
    table = page.split(place)[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*><td>([^<]+?) *<(.*?)</tr>", table, re.DOTALL)
    return {name.strip(): html.unescape(rest) for name, rest in rows}


def test_rows_say_whether_the_band_held_and_omit_what_was_not_read() -> None:
    place = "training_report.hardware"
    bare = {f"{place}.throttle_s": {"thermal": 0.0}, f"{place}.machine": None}
    dear = {"plan_against_actual.4.actual": 99.0}
    page = render_page(reading.changed(GPU.report, {**bare, **dear}), GPU.short)
    assert "outside the band" in _rows(page, '<section id="plan">')["Cost"]
    assert "never" in _rows(page, "The machine in figures")["Held back"]
    assert "processor" not in _rows(page, "What this report was made from")
