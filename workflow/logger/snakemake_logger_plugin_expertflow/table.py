"""The table: per expert, what would run, the forecast of its training, and its basis."""

import math
from dataclasses import dataclass, field
from typing import Any, TextIO

TITLE = "What the trainings should take; other jobs are not included"
NOTHING = "Nothing to train."
HEADER = ("expert", "jobs", "hours", "dollars", "on", "basis")
UNKNOWN = "unknown"
TRAIN = "train_expert"
# A forecast rests on a record. If this run rebuilds that record, the forecast is from the old one.
MADE_BY = {
    "plan": "plan_training",
    "calibrated plan": "plan_training",
    "estimate from packed tokens": "pack_sequences",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the table. ``hours`` and ``dollars`` read ``0.4 to 0.9``, or ``unknown``."""

    expert: str
    n_jobs: int
    hours: str
    dollars: str
    hardware: str
    basis: str

    def cells(self) -> tuple[str, ...]:
        return (
            self.expert,
            str(self.n_jobs),
            self.hours,
            self.dollars,
            self.hardware,
            self.basis,
        )


@dataclass(slots=True)
class Plan:
    """Pending work: the rules of each expert's jobs, and the forecast of its training."""

    rules: dict[str, list[str]] = field(default_factory=dict)
    forecasts: dict[str, str] = field(default_factory=dict)

    def add(self, *, rule: Any, wildcards: Any, resources: Any) -> None:
        """Add a job as reported by Snakemake; jobs that belong to no expert are ignored."""
        expert = wildcards.get("expert") if isinstance(wildcards, dict) else None
        if not isinstance(rule, str) or not isinstance(expert, str):
            return
        self.rules.setdefault(expert, []).append(rule)
        if rule == TRAIN:
            self.forecasts[expert] = str(getattr(resources, "forecast", ""))

    def rows(self) -> list[Row]:
        """Return a row per expert to train, sorted by name."""
        return [
            _row(expert, self.rules[expert], self.forecasts[expert])
            for expert in sorted(self.forecasts)
        ]


def total(texts: list[str]) -> str:
    """Add up ranges; unknown if one of them is.

    >>> total(["0.5 to 1.5", "2 to 4.1"])
    '2.5 to 5.6'
    """
    ranges = [text.split(" to ") for text in texts]
    if any(len(pair) != 2 for pair in ranges):
        return UNKNOWN
    try:
        low, high = (sum(map(float, values)) for values in zip(*ranges, strict=True))
    except ValueError:
        return UNKNOWN
    return f"{_number(low)} to {_number(high)}"


def print_table(plan: Plan, stream: TextIO, *, color: bool) -> None:
    """Print the table: fitted to the width of a terminal, or one plain line per expert."""
    rows = plan.rows()
    if not rows:
        print(f"\n{NOTHING}", file=stream)
        return
    lines = [row.cells() for row in rows]
    hours, dollars = total([row.hours for row in rows]), total([row.dollars for row in rows])
    has_total = len(rows) > 1 and hours != UNKNOWN
    if has_total:
        lines.append(("total", str(sum(row.n_jobs for row in rows)), hours, dollars, "", ""))
    if stream.isatty():
        _print_rich(lines, stream, color=color, has_total=has_total)
    else:
        _print_plain(lines, stream)


def _row(expert: str, rules: list[str], forecast: str) -> Row:
    parts = forecast.split("; ", 3)
    if len(parts) != 4:
        parts = [UNKNOWN, UNKNOWN, UNKNOWN, "no forecast; jobs in groups have none"]
    hours, dollars, hardware, basis = parts
    maker = MADE_BY.get(basis.split(";")[0].split(":")[0])
    if maker in rules:
        basis += "; made again in this run, these are the figures of before"
    return Row(
        expert=expert,
        n_jobs=len(rules),
        hours=hours.removesuffix(" hours"),
        dollars=dollars.removesuffix(" dollars"),
        hardware=hardware,
        basis=basis,
    )


def _number(value: float) -> str:
    """Format two significant digits, without an exponent.

    >>> _number(0.123), _number(4.56), _number(123.4)
    ('0.12', '4.6', '123')
    """
    n_decimals = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{n_decimals}f}"


def _print_plain(lines: list[tuple[str, ...]], stream: TextIO) -> None:
    table = [HEADER, *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    print(f"\n{TITLE}", file=stream)
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip(), file=stream)


def _print_rich(
    lines: list[tuple[str, ...]], stream: TextIO, *, color: bool, has_total: bool
) -> None:
    # Imported here: every start of Snakemake loads this package, but few print a table.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEADER:
        table.add_column(name, no_wrap=name not in ("expert", "basis"), overflow="fold")
    for i, line in enumerate(lines):
        style = "bold" if has_total and i == len(lines) - 1 else ""
        table.add_row(*(Text(cell) for cell in line), style=style)
    console = Console(file=stream, no_color=not color, highlight=False)
    console.print(f"\n[bold]{TITLE}[/bold]")
    console.print(table)
