"""Numbers for people, the terminal summary, and the comparison of experts."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from expertflow.report import format as f
from expertflow.report.compare import build_index, render_index
from expertflow.report.summary import print_summary, summary_rows
from expertflow.report.view import time_parts

Report = dict[str, Any]
PAGE = Path("r/report.html")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f.duration(89.9), "90 s"),
        (f.duration(90), "1.5 min"),
        (f.size(61.5e9), "61.5 GB"),
        (f.size(12), "12 B"),
        (f.signed_percent(-0.081), "\u22128.1 %"),
        (f.signed(-0.0001, 2), "0.00"),
        (f.signed(0, 0), "0"),
        (f.flops(989.5e12), "990 TFLOP/s"),
        (f.short(999.96e6), "1.00G"),
        (f.energy(1.47e6), "0.41 kWh"),
        (f.percent(0), "0 %"),
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text.replace(f.NBSP, " ") == expected


def test_bar_fills_the_wall_time(gpu_report: Report, cpu_report: Report) -> None:
    for report in (gpu_report, cpu_report):
        assert sum(part.fraction for part in time_parts(report)) == pytest.approx(1.0, abs=0.01)


def _printed(report: Report, **about: Any) -> str:
    stream = io.StringIO()
    # Not this machine's TERM and FORCE_COLOR.
    console = Console(file=stream, _environ={"TERM": "xterm"}, **about)
    print_summary(report, html_path=PAGE, console=console)
    return stream.getvalue()


def test_summary_has_the_verdict_and_the_eight_figures(
    gpu_report: Report, cpu_report: Report
) -> None:
    for report in (gpu_report, cpu_report):
        labels = [label for label, _ in summary_rows(report, html_path=PAGE)]
        assert labels[:4] == ["expert", "verdict", "change", "against nearest"]
        assert labels[-1] == "report"
        assert len(labels) == 5 + 8 + ("against earlier" in labels)


def test_summary_says_what_matters(cpu_report: Report) -> None:
    text = _printed(cpu_report, width=60)
    for part in (
        "Yes.",
        "18.5 %  (before 0.0 % · nearest 9.0 %)",
        "not measured: no price",
        "r/report.html",
    ):
        assert part in text


def test_summary_is_plain_where_nobody_watches(cpu_report: Report) -> None:
    lines = _printed(cpu_report, width=40).splitlines()
    assert len(lines) == 13 and "\x1b" not in "".join(lines)
    assert _printed(cpu_report, width=40, force_terminal=True).count("\x1b") > 11


@pytest.mark.parametrize("is_terminal", [False, True])
def test_summary_does_not_read_markup(cpu_report: Report, is_terminal: bool) -> None:
    cpu_report["run"]["expert"] = "[red]x[/red] [/nonsense]"
    text = _printed(cpu_report, width=200, force_terminal=is_terminal)
    assert "[red]x[/red] [/nonsense]" in text


def test_index_has_one_row_an_expert(gpu_report: Report, cpu_report: Report) -> None:
    cpu_report["run"]["expert"] = "an-expert"
    index = build_index([gpu_report, cpu_report])
    first, second = index["experts"]
    assert (first["expert"], second["expert"]) == ("expert-sql", "an-expert")  # as configured
    assert first["after_fraction"] == 0.61 and first["usd"] == gpu_report["cost"]["usd"]
    assert first["n_findings"] == len(gpu_report["findings"])
    planned = first["planned_hours"] * (1 + first["hours_difference_fraction"])
    assert planned == pytest.approx(first["wall_s"] / 3600)
    assert second["usd"] is None and "price" in second["unavailable"]["usd"]
    assert second["hours_difference_fraction"] is None
    assert second["source_licences"] == ["CC0-1.0"]


def test_index_page(gpu_report: Report, cpu_report: Report) -> None:
    cpu_report["run"]["expert"] = "<b>&"
    page = render_index(build_index([gpu_report, cpu_report]))
    assert 'href="expert-sql/report.html"' in page and "2 of 2 learned" in page
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert "demo preset" in page
    assert not re.findall(r"https?://|<script", page)


def test_index_of_nothing() -> None:
    assert "No expert has a report yet" in render_index(build_index([]))


def test_an_answer_of_blanks_is_said_not_drawn() -> None:
    assert f.clip("\n" * 64, 100) == "(64 blanks and line breaks)"
    assert f.clip("", 100) == "(nothing)"
    assert f.clip("abcdef", 4) == "abcd… (2 more characters)"
