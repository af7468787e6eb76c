"""Print a run in a few lines from report.json: the verdict, eight figures, the location."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertflow.core.format import show_hidden
from expertflow.report import format as f
from expertflow.report.headline import Tile, describe_subject, make_tiles
from expertflow.report.learned import format_change
from expertflow.report.measured import Missing, is_measured
from expertflow.report.records import Report

COLORS = {"good": "green", "mixed": "yellow", "bad": "red"}


def print_summary(report: Report, *, html_path: Path, console: Console | None = None) -> None:
    console = console or Console()
    rows = summary_rows(report, html_path=html_path)
    if not console.is_terminal:  # one figure per line, for logs and grep
        for label, text in rows:
            console.print(f"{label:<22} {text}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        style = f"bold {COLORS[report.verdict.level]}" if label == "verdict" else ""
        # Text, not str: names from data and manifests must not be parsed as rich markup
        table.add_row(label, Text(text, style=style))
    console.print(table)


def summary_rows(report: Report, *, html_path: Path) -> list[tuple[str, str]]:
    verdict, earlier = report.verdict, report.evaluation.earlier
    # The verdict states all other changes.
    change = earlier.change if earlier else None
    rows = [
        ("expert", describe_subject(report)),
        ("verdict", f"{verdict.answer} {verdict.sentence}"),
        *([("against earlier", f"{change.change}: {format_change(change)}")] if change else ()),
        *(_figure(tile) for tile in make_tiles(report)),
        ("entire run", _entire_run(report)),
        ("report", str(html_path)),
    ]
    # Plain spaces, so that grep finds the text as shown: 45 min.
    return [(label, show_hidden(text.replace(f.NBSP, " "))) for label, text in rows]


def _entire_run(report: Report) -> str:
    bill = report.bill
    if isinstance(bill, Missing):
        return f"{bill}: {bill.reason}"
    parts = [f"{f.duration(bill.machine.wall_s)} from first job to last"]
    if is_measured(bill.machine.usd):
        parts.append(f"{f.usd(bill.machine.usd)} on a rented machine")
    # Three show where the time went; the page has all.
    longest = sorted(bill.stages, key=lambda stage: -stage.wall_s)[:3]
    parts += [f"{stage.stage} {f.duration(stage.wall_s)}" for stage in longest]
    if bill.between_jobs_s > bill.machine.wall_s / 10:
        parts.append(f"{f.duration(bill.between_jobs_s)} between jobs")
    if lost_s := sum(lost.wall_s for lost in bill.lost):
        parts.append(f"{f.duration(lost_s)} lost in attempts that ended early")
    return ", ".join(parts)


def _figure(tile: Tile) -> tuple[str, str]:
    # MFU stays; Held-out loss starts in lower case like the other labels.
    label = tile.label if tile.label.isupper() else tile.label[:1].lower() + tile.label[1:]
    if isinstance(tile.value, Missing):
        return label, f"{tile.value}: {tile.value.reason}"
    return label, f"{tile.value}  ({tile.note})" if tile.note else tile.value
