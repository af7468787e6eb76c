"""Print a run in ten lines, from report.json alone."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertflow.report import format as f
from expertflow.report import view

Report = dict[str, Any]

COLOURS = {"good": "green", "mixed": "yellow", "bad": "red"}


def print_summary(
    report: Report, *, json_path: Path, html_path: Path, console: Console | None = None
) -> None:
    """Print the verdict, what was learned, what it took, and where the whole report is."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in summary_rows(report, json_path=json_path, html_path=html_path):
        style = COLOURS[report["verdict"]["level"]] if label == "verdict" else ""
        # Text, not str: names from data and manifests must not be read as rich markup
        table.add_row(label, Text(text, style=style))
    (console or Console()).print(table)


def summary_rows(report: Report, *, json_path: Path, html_path: Path) -> list[tuple[str, str]]:
    """Give the ten lines as (label, text)."""
    verdict = report["verdict"]
    return [
        ("expert", view.subject(report)),
        ("verdict", " ".join([verdict["answer"], *_worst(report)])),
        ("evaluation", _evaluation(report)),
        ("held-out loss", _held_out_loss(report)),
        ("tokens/s", _speed(report)),
        ("wall", _wall(report)),
        ("cost", _or_reason(report, "cost.usd", f.usd)),
        ("data", _data(report)),
        ("report.json", str(json_path)),
        ("report.html", str(html_path)),
    ]


def _worst(report: Report) -> list[str]:
    return [f"Note: {finding['evidence']}." for finding in report["findings"][:1]]


def _or_reason(report: Report, path: str, show: view.Show) -> str:
    shown = view.cell(report, path, show)
    return f"{shown.text}: {shown.reason}" if shown.reason else shown.text


def _evaluation(report: Report) -> str:
    evaluation = report["evaluation"]
    before, after = evaluation["before"]["value_fraction"], evaluation["after"]["value_fraction"]
    if before is None or after is None:
        return _or_reason(report, "evaluation.delta.value_fraction", f.points)
    text = f"{f.words(evaluation['metric'])} {f.tenths(before)} -> {f.tenths(after)}"
    interval = evaluation["delta"]["ci95"]
    if interval is None:
        return text
    return f"{text} (change {f.points(interval[0])} to {f.points(interval[1])} points)"


def _held_out_loss(report: Report) -> str:
    evaluation, training = report["evaluation"], report["training_report"]["training"]
    before, after = (evaluation[side]["held_out_loss"] for side in ("before", "after"))
    first, last = training["loss_first"], training["loss_last"]
    return (
        f"{f.loss(before)} -> {f.loss(after)} nats a token "
        f"(training {f.loss(first)} -> {f.loss(last)})"
    )


def _speed(report: Report) -> str:
    speed = _or_reason(report, "throughput.useful_tokens_per_s", f.short)
    return f"{speed}, MFU {_or_reason(report, 'throughput.mfu_fraction', f.percent)}"


def _wall(report: Report) -> str:
    largest = sorted(view.time_parts(report), key=lambda part: -part.fraction)[:4]
    shares = ", ".join(f"{part.label.lower()} {f.percent(part.fraction)}" for part in largest)
    return f"{f.duration(report['time']['wall_s'])}: {shares}"


def _data(report: Report) -> str:
    data = report["data"]
    return (
        f"{f.count(data['documents_train'])} documents, {f.short(data['trained_tokens'])} tokens "
        f"trained, rows of {f.count(data['seq_len'])}, fill "
        f"{_or_reason(report, 'data.fill_fraction', f.tenths)}"
    )
