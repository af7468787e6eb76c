"""Numbers for people, the terminal summary, the comparison of experts, and their scripts."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
from made_up_records import make_packing
from made_up_runs import CPU, GPU
from msgspec.structs import replace
from report_reading import changed
from rich.console import Console
from support import run_script

from expertflow.config.attach import reports_to_sum_up
from expertflow.config.plain_rows import describe_rows
from expertflow.core.errors import ExpertflowError
from expertflow.report import format as f
from expertflow.report.check import read_report
from expertflow.report.compare import build_index, index_row, render_index
from expertflow.report.records import Report
from expertflow.report.summary import print_summary


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f.duration(89.9), "90 s"), (f.duration(90), "1.5 min"), (f.size(61.5e9), "61.5 GB"),
        (f.percent_with_sign(-0.081), "\u22128.1 %"),
        (f.with_sign(-0.0001, 2), "0.00"), (f.with_sign(0, 0), "0"),
        (f.flops(989.5e12), "990 TFLOP/s"), (f.short(999.96e6), "1.00G"),
        (f.energy(1.47e6 / 3.6e6), "0.41 kWh"), (f.percent(0), "0 %"), (f.percent(0.0312), "3.1 %"),
        (f.percent(0.9996), ">99.9 %"), (f.percent(1), "100 %"),
        (f.percent(0.0004), "<0.1 %"), (f.percent(1 - 1e-12), "100 %"),
        (f.tenths(0.9996), ">99.9 %"), (f.tenths(0.0004), "<0.1 %"), (f.tenths(1), "100.0 %"),
        (f.short_time(0.9996), "1 s"), (f.short_time(0.0009996), "1 ms"),
        (f.usd(6.9e-5), "<$0.0001"), (f.usd(0), "$0.00"),
        (f.usd(0.00123), "$0.0012"), (f.usd_rate(0.01904), "$0.019"),
        (f.usd_rate(2.8e-5), "<$0.0001"), (f.usd_rate(0.0996), "$0.10"),
        (f.factor(0.834), "\u00d70.834"), (f.factor(12.34), "\u00d712.3"),
        (f.short_time(0.00042), "420 \u00b5s"), (f.short_hash("9d" * 32), "9d9d9d9d9d9d9d9d\u2026"),
        (f.hold("95 % of 12 min"), "95 % of 12 min"),
        (f.clip("\n" * 64, 100), "(64 whitespace characters)"), (f.clip("", 100), "(empty)"),
        (f.clip("abcdef", 4), "abcd… (2 more characters)"),
    ],
)  # fmt: skip
def test_numbers(text: str, expected: str) -> None:
    assert text.replace(f.NBSP, " ") == expected


def test_rows_with_any_padding_are_not_full() -> None:
    packing = make_packing()
    nearly = replace(packing.train, n_tokens=9_999, n_padding_tokens=1)
    train, held_out, *_ = describe_rows(replace(packing, train=nearly))
    assert train.endswith(", >99.9 % full") and held_out.endswith(" % full")


def _printed(report: Report, **about: Any) -> str:
    stream = io.StringIO()
    # Without this machine's TERM and FORCE_COLOR.
    console = Console(file=stream, _environ={"TERM": "xterm"}, **about)
    print_summary(report, html_path=Path("r/x"), console=console)
    return stream.getvalue()


def test_the_summary_has_what_matters() -> None:
    text = _printed(CPU.report, width=60)
    for part in ("Yes.", "18.5 %  (before 0.0 % · nearest 9.0 %)", "not measured: no price",
                 "45 min from first job to last, train_expert 45 min", "r/x"):  # fmt: skip
        assert part in text
    bill = replace(CPU.report.bill, between_jobs_s=600.0)
    assert ", 10 min between jobs" in _printed(replace(CPU.report, bill=bill))
    # Plain text without a terminal.
    lines = _printed(CPU.report, width=40).splitlines()
    # The verdict states the change, and that against baselines.
    assert len(lines) == 12 and "\x1b" not in "".join(lines)
    assert _printed(CPU.report, width=40, force_terminal=True).count("\x1b") > 9
    # Markup is not interpreted.
    odd = changed(CPU.report, {"run.expert": "[red]x[/red] [/nonsense]"})
    for is_terminal in (False, True):
        assert "[red]x[/red] [/nonsense]" in _printed(odd, width=200, force_terminal=is_terminal)


def test_the_index_has_one_row_per_expert() -> None:
    other = changed(CPU.report, {"run.expert": "an-expert"})
    index = build_index([index_row(report) for report in (GPU.report, other)])
    first, second = index["experts"]
    assert (first["expert"], second["expert"]) == ("expert-sql", "an-expert")  # as configured
    assert second["usd"] is None and "price" in second["unavailable"]["usd"]
    assert second["hours_difference_fraction"] is None
    assert second["unavailable"]["hours_difference_fraction"] == "no speed is known for this CPU"
    assert second["source_licenses"] == ["CC0-1.0"]
    assert "No expert has a report yet" in render_index([], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no report; run snakemake"),
        ("{", "not JSON"),
        ("[]", "outdated or damaged"),
        ('{"schema_version": 1}', "outdated or damaged"),
    ],
)
def test_an_unreadable_report_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ExpertflowError, match=f"{path}: {message}"):
        read_report(path)


def test_a_folder_in_place_of_a_report_is_one_line(tmp_path: Path) -> None:
    outputs = (f"--output={tmp_path}/i.json", f"--html={tmp_path}/i.html")
    done = run_script("compare_experts", "--spec={}", "--reports", tmp_path, *outputs)
    assert done.stderr.startswith(f"error: {tmp_path}: a folder exists where a file is needed; ")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_run_ends_with_its_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expert, made_s in (("old", 99), ("new", 101), ("other", 101)):
        path = Path("results", expert, "report.json")
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (made_s, made_s))
    experts = ["old", "new", "missing"]
    new, old = "results/new/report.json", "results/old/report.json"
    assert reports_to_sum_up([], experts, since_s=100) == [new]
    assert reports_to_sum_up(["results/index.html"], experts, since_s=100) == [new]
    assert reports_to_sum_up([old], experts, since_s=100) == [old, new]
    assert reports_to_sum_up([], experts, since_s=102) == []
