"""Print a run in a few lines, from report.json alone: the verdict, the eight figures, the place."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertflow.report import format as f
from expertflow.report import view
from expertflow.report.ablation_facts import ablations
from expertflow.report.ablation_page import in_a_line
from expertflow.report.learned import best_baseline, deciding_change, spelled

Report = dict[str, Any]

COLOURS = {"good": "green", "mixed": "yellow", "bad": "red"}


def print_summary(report: Report, *, html_path: Path, console: Console | None = None) -> None:
    console = console or Console()
    rows = summary_rows(report, html_path=html_path)
    if not console.is_terminal:  # a line a figure, for logs and grep
        for label, text in rows:
            console.print(f"{label:<18} {text}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        style = f"bold {COLOURS[report['verdict']['level']]}" if label == "verdict" else ""
        # Text, not str: names from data and manifests must not be read as rich markup
        table.add_row(label, Text(text, style=style))
    console.print(table)


def summary_rows(report: Report, *, html_path: Path) -> list[tuple[str, str]]:
    verdict = report["verdict"]
    return [
        ("expert", view.subject(report)),
        ("verdict", f"{verdict['answer']} {verdict['sentence']}"),
        *_compared(report),
        *((_label(tile.label), _figure(tile)) for tile in view.tiles(report)),
        *(("ablation", in_a_line(record).replace(f.NBSP, " ")) for record in ablations(report)),
        ("report", str(html_path)),
    ]


def _compared(report: Report) -> list[tuple[str, str]]:
    evaluation = report["evaluation"]
    change, best, earlier = (
        deciding_change(evaluation),
        best_baseline(evaluation),
        evaluation["earlier"],
    )
    found = [
        ("change", change),
        (f"against {best['name']}" if best else "", best["change"] if best else None),
        ("against earlier", earlier["change"] if earlier else None),
    ]
    return [
        (label, f"{item['change']}: {spelled(item)}".replace(f.NBSP, " "))
        for label, item in found
        if item is not None
    ]


def _label(text: str) -> str:
    return text if text.isupper() else text[:1].lower() + text[1:]


def _figure(tile: view.Tile) -> str:
    if tile.value.reason:
        return f"{tile.value.text}: {tile.value.reason}"
    text = f"{tile.value.text}  ({tile.note})" if tile.note else tile.value.text
    return text.replace(f.NBSP, " ")
