"""report.html: one small file without network or script, and what it lays side by side."""

import html
import re

import pytest
import report_reading as reading
from made_up_runs import CPU, GPU
from msgspec.structs import replace

from expertflow.core.format import show_hidden
from expertflow.core.records import from_json
from expertflow.report import format as f
from expertflow.report.build import build_report
from expertflow.report.charts.frame import _themed
from expertflow.report.compare import index_row, render_index
from expertflow.report.headline import make_tiles
from expertflow.report.measured import restore, to_plain
from expertflow.report.page import render_page
from expertflow.report.records import Report

PLACES = (("evaluation", "time"), ("samples", "findings"), ("timeline", "data"),
          ("plan", "sources"), ("provenance", "footer"))  # fmt: skip


def test_page_is_well_formed_small_and_in_order() -> None:
    for page in (GPU.page, CPU.page):
        reading.check_page_is_safe(page)
        assert len(page.encode()) < reading.MAX_PAGE_BYTES / 2
    drawings = "".join(re.findall(r"<svg.*?</svg>", GPU.page, re.DOTALL))
    assert "var(--blue)" in drawings and "var(--rule)" in drawings
    assert set(re.findall(r'"#[0-9a-f]{3,6}"', drawings)) == set()
    assert "prefers-color-scheme: dark" in GPU.page
    assert render_page(CPU.report, CPU.inputs) == CPU.page
    wanted = ["evaluation", "bill", "time", "kernels", "training", "timeline", "data", "comparison",
              "trained", "samples", "findings", "plan", "sources", "provenance"]  # fmt: skip
    assert re.findall(r'<section id="(\w+)"', GPU.page) == wanted
    assert GPU.page.index("verdict mixed") < GPU.page.index('class="tiles"')
    assert GPU.page.count('class="tile"') == 8


def test_tiles_and_parts_of_the_time_tell_the_figures() -> None:
    notes = {tile.label: tile.note.replace(f.NBSP, " ") for tile in make_tiles(GPU.report)}
    assert notes["Training cost"] == "plan $1.82 \u00b7 +3.2 %"
    assert notes["MFU"] == "of 990 TFLOP/s bf16"
    assert notes["Peak GPU memory"] == "of 80.0 GB \u00b7 23 % free"
    # The steps of a CPU are timed by their parts.
    legend = re.compile(r"<span>([^<]+)</span><b>[^<]+</b><em>([\d.]+)")
    cpu, gpu = (
        {name: float(percent) for name, percent in legend.findall(reading.section(page, "time"))}
        for page in (CPU.page, GPU.page)
    )
    assert (cpu["Forward and backward"], cpu["Optimizer"]) == (88.1, 3.8)
    assert sum(cpu.values()) == pytest.approx(100, abs=0.3)
    assert sum(gpu.values()) == pytest.approx(100, abs=0.3)


def test_preset_split_and_missing_values_are_said() -> None:
    for text in ("preset full", "simulated hardware readings", "90 sampled steps"):
        assert text in GPU.page
    assert "Demo preset" not in GPU.page and "sampled steps" not in CPU.page
    assert "Demo preset: a small model and few steps" in CPU.page
    assert "not measured" in CPU.page
    assert 'title="no price per hour is configured for this hardware"' in CPU.page
    assert "Any kernel running" not in CPU.page  # no chart without a reading
    assert not re.search(">(None|nan|null)<", CPU.page)


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
    _escaped(render_index([index_row(hostile_report), index_row(other)]))
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


PLAN = '<section id="plan">'


def test_rows_say_whether_the_band_held_and_omit_what_was_not_read() -> None:
    rows = _rows(GPU.page, PLAN)
    assert ">0</td>" in rows["Optimizer steps"] and "the band" not in rows["Optimizer steps"]
    assert "within the band" in rows["Wall time"] and " to " in rows["Wall time"]
    dear = reading.changed(GPU.report, {"plan_against_actual.4.actual": 99.0})
    assert "outside the band" in _rows(render_page(dear, GPU.short), PLAN)["Cost"]
    blank = _rows(CPU.page, PLAN)["Cost"]
    assert blank.count("not predicted") == blank.count("not measured") == 1
    assert blank.count('title="') == 2
    figures, provenance = "The machine in figures", "What this report was made from"
    gpu, cpu = _rows(GPU.page, figures), _rows(CPU.page, figures)
    assert f.energy(1.47e6) in gpu["Energy"]
    names = {"Energy", "Power", "Hottest", "Held back", "Clocks", "PCIe"}
    assert names <= set(gpu) and not names & set(cpu)
    assert "processor" in _rows(GPU.page, provenance)
    place = "training_report.hardware"
    bare = {f"{place}.throttle_s": {"thermal": 0.0}, f"{place}.machine": None}
    page = render_page(reading.changed(GPU.report, bare), GPU.short)
    assert "never" in _rows(page, figures)["Held back"]
    assert "processor" not in _rows(page, provenance)
