"""report.html: one small file without network or script, safe against what data may contain."""

import copy
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import MAX_PAGE_BYTES, render_page

HOSTILE = "<script>alert(1)</script>\" onload='x' {{ 7 * 7 }} </style></pre> \u202e \u2028"
VOID = {"meta", "br", "path", "line", "rect", "circle", "stop"}


class _Outline(HTMLParser):
    """Collects tags and attributes, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def _outline(page: str) -> _Outline:
    outline = _Outline()
    outline.feed(page)
    assert outline.open == []
    return outline


@pytest.fixture(scope="module")
def gpu_page(gpu_inputs: ReportInputs) -> str:
    return render_page(build_report(gpu_inputs, {}), gpu_inputs)


@pytest.fixture(scope="module")
def cpu_page(cpu_inputs: ReportInputs) -> str:
    return render_page(build_report(cpu_inputs, {}), cpu_inputs)


def test_page_is_well_formed_and_small(gpu_page: str, cpu_page: str) -> None:
    for page in (gpu_page, cpu_page):
        _outline(page)
        assert len(page.encode()) < MAX_PAGE_BYTES / 2


def test_page_needs_no_network_and_no_script(gpu_page: str) -> None:
    outline = _outline(gpu_page)
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert not re.findall(r"(?:href|src|url\()\s*=?\s*[\"']?(?:https?:)?//", gpu_page)


def test_colours_come_from_the_page(gpu_page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", gpu_page, re.DOTALL))
    assert "var(--blue)" in drawings and "var(--rule)" in drawings
    assert set(re.findall(r'"#[0-9a-f]{3,6}"', drawings)) == set()
    assert "prefers-color-scheme: dark" in gpu_page


def test_two_drawings_of_one_report_are_equal(cpu_inputs: ReportInputs, cpu_page: str) -> None:
    assert render_page(build_report(cpu_inputs, {}), cpu_inputs) == cpu_page


def test_sections_are_in_order(gpu_page: str) -> None:
    wanted = ["time", "evaluation", "training", "timeline", "data", "trained", "samples",
              "findings", "plan", "sources", "provenance"]  # fmt: skip
    assert re.findall(r'<section id="(\w+)"', gpu_page) == wanted
    assert gpu_page.index("verdict mixed") < gpu_page.index('class="tiles"')
    assert gpu_page.count('class="tile"') == 8


def test_preset_is_said(gpu_page: str, cpu_page: str) -> None:
    assert "preset full" in gpu_page and "simulated hardware readings" in gpu_page
    assert "Demo preset: a small model and few steps" in cpu_page
    assert "Demo preset" not in gpu_page


def test_missing_values_say_why(cpu_page: str) -> None:
    assert "not measured" in cpu_page
    assert 'title="no price per hour is configured for this hardware"' in cpu_page
    assert "Any kernel running" not in cpu_page  # no chart without a reading
    for blank in (">None<", ">nan<", ">null<"):
        assert blank not in cpu_page


def _hostile(value: Any, key: str = "") -> Any:
    """Replace every free text of a report; leave those that schema or templates interpret."""
    kept = {"level", "learned", "severity", "op", "verdict", "started_at", "preset"}
    if isinstance(value, str):
        return value if key in kept else HOSTILE
    if isinstance(value, dict):
        return {
            HOSTILE if key.endswith("_by_reason") or key == "n_by_kind" else k: _hostile(v, k)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_hostile(item, key) for item in value]
    return value


def test_hostile_texts_are_escaped(cpu_inputs: ReportInputs) -> None:
    report = build_report(cpu_inputs, {"command": "x"})
    page = render_page(_hostile(copy.deepcopy(report)), cpu_inputs)
    outline = _outline(page)
    assert "script" not in outline.tags
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert "&lt;script&gt;" in page and "<script" not in page
    assert "{{ 7 * 7 }}" in page


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


def test_run_without_series_has_a_page(cpu_inputs: ReportInputs) -> None:
    inputs = replace(cpu_inputs, steps=(), samples=())
    page = render_page(build_report(inputs, {}), inputs)
    _outline(page)
    assert "No readings were taken." in page
