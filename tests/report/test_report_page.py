"""report.html: one small file without network or script, and what it lays side by side."""

import html
import re
from typing import Any

import pytest
from made_up_runs import PROVENANCE
from msgspec.structs import replace
from report_reading import MAX_PAGE_BYTES, Outline, changed, check_page_is_safe

from expertflow.core.records import from_json
from expertflow.report import format as f
from expertflow.report.build import build_report
from expertflow.report.charts.frame import _themed
from expertflow.report.compare import index_row, render_index
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import restore, to_plain
from expertflow.report.page import render_page
from expertflow.report.records import Report

HOSTILE = "<script>alert(1)</script>\" onload='x' {{ 7 * 7 }} </style></pre> \u202e \x1b[2J \u2028"

PLACES = (("evaluation", "time"), ("samples", "findings"), ("timeline", "data"),
          ("plan", "sources"), ("provenance", "footer"))  # fmt: skip


@pytest.fixture(scope="module")
def gpu_page(gpu_inputs: ReportInputs) -> str:
    return render_page(build_report(gpu_inputs, PROVENANCE), gpu_inputs)


@pytest.fixture(scope="module")
def cpu_page(cpu_inputs: ReportInputs) -> str:
    return render_page(build_report(cpu_inputs, {}), cpu_inputs)


def test_page_is_well_formed_and_small(gpu_page: str, cpu_page: str) -> None:
    for page in (gpu_page, cpu_page):
        check_page_is_safe(page)
        assert len(page.encode()) < MAX_PAGE_BYTES / 2
    drawings = "".join(re.findall(r"<svg.*?</svg>", gpu_page, re.DOTALL))
    assert "var(--blue)" in drawings and "var(--rule)" in drawings
    assert set(re.findall(r'"#[0-9a-f]{3,6}"', drawings)) == set()
    assert "prefers-color-scheme: dark" in gpu_page


def test_two_drawings_of_one_report_are_equal(cpu_inputs: ReportInputs, cpu_page: str) -> None:
    assert render_page(build_report(cpu_inputs, {}), cpu_inputs) == cpu_page


def test_sections_are_in_order(gpu_page: str) -> None:
    wanted = ["evaluation", "time", "kernels", "training", "timeline", "data", "comparison",
              "trained", "samples", "findings", "plan", "sources", "provenance"]  # fmt: skip
    assert re.findall(r'<section id="(\w+)"', gpu_page) == wanted
    assert gpu_page.index("verdict mixed") < gpu_page.index('class="tiles"')
    assert gpu_page.count('class="tile"') == 8


def test_preset_and_split_are_said(gpu_page: str, cpu_page: str) -> None:
    assert "preset full" in gpu_page and "simulated hardware readings" in gpu_page
    assert "Demo preset: a small model and few steps" in cpu_page
    assert "Demo preset" not in gpu_page
    assert "90 sampled steps" in gpu_page and "sampled steps" not in cpu_page


def test_missing_values_say_why(cpu_page: str) -> None:
    assert "not measured" in cpu_page
    assert 'title="no price per hour is configured for this hardware"' in cpu_page
    assert "Any kernel running" not in cpu_page  # no chart without a reading
    for blank in (">None<", ">nan<", ">null<"):
        assert blank not in cpu_page


def _hostile(value: Any, key: str = "") -> Any:
    """Replace every free text of a report; leave those that schema or templates interpret."""
    kept = {"kind", "level", "learned", "severity", "op", "verdict", "started_at", "preset", "unit",
            "change", "status", "method", "chat_template", "split_source", "origin", "action",
            "merged_into", "class", "confidence"}  # fmt: skip
    names = {"n_by_kind", "throttle_s", "temperature_limits_c", "machine", "versions"}
    if isinstance(value, str):
        is_quantity = key == "quantity" and value.endswith(("_percent", "_c", "_bytes", "_loss"))
        return value if key in kept or is_quantity else HOSTILE
    if isinstance(value, dict):
        return {
            HOSTILE if key.endswith("_by_reason") or key in names else k: _hostile(v, k)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_hostile(item, key) for item in value]
    return value


def _hostile_report(report: Report) -> Report:
    plain, nulls = to_plain(report)
    return restore(from_json(Report, _hostile(plain)), dict.fromkeys(nulls, HOSTILE))


def _escaped(page: str) -> str:
    check_page_is_safe(page)
    assert "&lt;script&gt;" in page and "<script" not in page
    assert "{{ 7 * 7 }}" in page
    assert "&lt;U+202E&gt; &lt;U+001B&gt;[2J" in page
    assert not {"\u202e", "\x1b"} & set(page)
    return page


@pytest.mark.parametrize("which", ["cpu", "gpu"])
def test_hostile_texts_are_escaped(which: str, request: pytest.FixtureRequest) -> None:
    inputs = request.getfixturevalue(f"{which}_inputs")
    page = _escaped(render_page(_hostile_report(build_report(inputs, PROVENANCE)), inputs))
    if which == "gpu":  # the places that only a full report has
        for section, end in PLACES:
            part = page.split(f'<section id="{section}"')[1].split(f'id="{end}"')[0]
            assert part.count("&lt;script&gt;") > 3, section


def test_hostile_texts_are_escaped_in_the_index(gpu_report: Report) -> None:
    other = changed(gpu_report, {"run.preset": "demo", "data.sources.0.license": HOSTILE})
    rows = [index_row(report) for report in (_hostile_report(gpu_report), other)]
    _escaped(render_index(rows))


def test_texts_in_drawings_are_escaped() -> None:
    svg = _themed('<svg width="1"><text>a</text></svg>', HOSTILE)
    outline = Outline(svg)
    assert outline.tags == ["svg", "text"]
    assert dict(outline.attributes)["aria-label"] == HOSTILE


def test_long_texts_do_not_burst_the_page(cpu_inputs: ReportInputs) -> None:
    sample = replace(cpu_inputs.evaluation.samples[0], prompt="<" * 300_000, after="&" * 300_000)
    source = cpu_inputs.datasets.sources[0]
    inputs = replace(
        cpu_inputs,
        evaluation=replace(cpu_inputs.evaluation, samples=(sample,) * 50),
        datasets=replace(cpu_inputs.datasets, sources=(source,) * 3_000),
    )
    page = render_page(build_report(inputs, {}), inputs)
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert "more characters" in page and "more in report.json" in page


def test_long_series_do_not_burst_the_page(gpu_inputs: ReportInputs) -> None:
    steps = [replace(gpu_inputs.steps[i % 1_800], step=i + 1) for i in range(40_000)]
    samples = [replace(gpu_inputs.samples[i % 1_000], elapsed_s=float(i)) for i in range(40_000)]
    last = gpu_inputs.training.save_points[-1]
    training = replace(gpu_inputs.training, save_points=(last,) * 300)
    inputs = replace(gpu_inputs, steps=tuple(steps), samples=tuple(samples), training=training)
    page = render_page(build_report(gpu_inputs, PROVENANCE), inputs)
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert page.count("<figure>") >= 11


def test_every_table_and_drawing_is_named(gpu_page: str, cpu_page: str) -> None:
    for page in (gpu_page, cpu_page):
        assert page.count("<table") == page.count("<caption>") > 8
        drawings = re.findall(r"<svg [^>]*>", page)
        assert drawings
        for drawing in drawings:
            label = re.search(r'role="img" aria-label="([^"]*)"', drawing)
            assert label is not None and len(label[1]) > 30, drawing


def test_parts_without_content_are_left_out(cpu_inputs: ReportInputs) -> None:
    report = changed(build_report(cpu_inputs, PROVENANCE), {
        "plan.options": [], "plan.claims": [], "plan.memory": None, "provenance.chain": [],
    })  # fmt: skip
    page = render_page(report, cpu_inputs)
    Outline(page)
    for text in ("The same work", "Claims, held", "Device memory", "From sources to report"):
        assert text not in page
    page = render_page(report, replace(cpu_inputs, steps=(), samples=()))
    Outline(page)
    assert "No readings were taken." in page


def _rows(report: Report, inputs: ReportInputs, section: str) -> dict[str, str]:
    """Return the lines of the first table of a section of the page by their first cell."""
    table = render_page(report, inputs).split(section)[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*><td>([^<]+?) *<(.*?)</tr>", table, re.DOTALL)
    return {name.strip(): html.unescape(rest) for name, rest in rows}


PLAN = '<section id="plan">'

OPTIONS = "The same work on other hardware"


def test_plan_rows_say_whether_the_band_held(
    gpu_report: Report, gpu_inputs: ReportInputs, cpu_report: Report, cpu_inputs: ReportInputs
) -> None:
    rows = _rows(gpu_report, gpu_inputs, PLAN)
    assert ">0</td>" in rows["Optimizer steps"] and "the band" not in rows["Optimizer steps"]
    assert "within the band" in rows["Wall time"] and " to " in rows["Wall time"]
    dear = changed(gpu_report, {"plan_against_actual.4.actual": 99.0})
    assert "outside the band" in _rows(dear, gpu_inputs, PLAN)["Cost"]
    blank = _rows(cpu_report, cpu_inputs, PLAN)["Cost"]
    assert blank.count("not predicted") == blank.count("not measured") == 1
    assert blank.count('title="') == 2


def test_memory_is_drawn_to_the_scale_of_the_card(gpu_page: str, cpu_page: str) -> None:
    section = gpu_page.split("<h3>Device memory")[1].split("</ul>")[0]
    predicted, reserved = section.split('<div class="bar">')[1:3]
    shares = [float(x) for x in re.findall(r"flex:0 0 ([\d.]+)%", predicted)]
    assert sum(shares) == pytest.approx(100 * 63 / 80, abs=0.01)  # GB of the card's
    assert "flex:0 0 76.875%" in reserved
    assert "Device memory" not in cpu_page


def test_options_without_fit_or_price_say_so(gpu_report: Report, gpu_inputs: ReportInputs) -> None:
    shown = _rows(gpu_report, gpu_inputs, OPTIONS)
    assert len(shown) == len(gpu_report.plan.options) > 1
    for item in gpu_report.plan.options:
        option = shown[f"{item.n_gpus} \u00d7 {item.name}"]
        assert ("does not fit" in option) == (item.fits is False)
        assert ("unknown" in option) == (not item.usd)
        assert item.remark and item.remark in option


MACHINE = "The machine in figures"


def test_lines_leave_out_what_was_not_read(
    gpu_report: Report, gpu_inputs: ReportInputs, cpu_report: Report, cpu_inputs: ReportInputs
) -> None:
    gpu = _rows(gpu_report, gpu_inputs, MACHINE)
    cpu = _rows(cpu_report, cpu_inputs, MACHINE)
    assert f.energy(1.47e6) in gpu["Energy"]
    names = {"Energy", "Power", "Hottest", "Held back", "Clocks", "PCIe"}
    assert names <= set(gpu) and not names & set(cpu)
    place = "training_report.hardware"
    cool = changed(gpu_report, {f"{place}.throttle_s": {"thermal": 0.0}})
    assert "never" in _rows(cool, gpu_inputs, MACHINE)["Held back"]
    provenance = "What this report was made from"
    assert "processor" in _rows(gpu_report, gpu_inputs, provenance)
    bare = changed(gpu_report, {f"{place}.machine": None})
    assert "processor" not in _rows(bare, gpu_inputs, provenance)
