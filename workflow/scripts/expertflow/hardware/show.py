"""Show a monitor's figures in a terminal: live, at the end, and two records side by side."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from expertflow.hardware.card import Card
from expertflow.hardware.monitor import Watcher
from expertflow.hardware.records import GpuSample, MonitorRecord, Stats

GB, MB = 1e9, 1e6
# Figure: its name in words, its unit, and how many of ours are one of it.
SHOWN = {
    "any_kernel_percent": ("any kernel running", "%", 1.0),
    "sm_active_percent": ("SM active", "%", 1.0),
    "tensor_active_percent": ("tensor cores active", "%", 1.0),
    "memory_used_bytes": ("GPU memory", "GB", GB),
    "power_w": ("power", "W", 1.0),
    "power_all_w": ("power, all visible GPUs", "W", 1.0),
    "temperature_c": ("temperature", "°C", 1.0),
    "sm_clock_mhz": ("SM clock", "MHz", 1.0),
    "memory_clock_mhz": ("memory clock", "MHz", 1.0),
    "pcie_rx_bytes_per_s": ("PCIe to the GPU", "MB/s", MB),
    "pcie_tx_bytes_per_s": ("PCIe from the GPU", "MB/s", MB),
    "cpu_percent": ("CPU, whole machine", "%", 1.0),
    "ram_used_bytes": ("RAM, whole machine", "GB", GB),
}
# Times the figure before, up to which the difference is also shown as a share of it.
MOST_TIMES = 100
FIELDS = {name: name for name in SHOWN} | {"any_kernel_percent": "utilization_percent"}
TOTALS = {
    "energy_j": ("energy", "kJ", 1e3),
    "energy_all_j": ("energy, all visible GPUs", "kJ", 1e3),
    "disk_read_bytes": ("read from disks", "GB", GB),
    "disk_write_bytes": ("written to disks", "GB", GB),
    "wall_s": ("time watched", "s", 1.0),
    "effective_interval_s": ("time between readings", "s", 1.0),
    "monitor_cpu_fraction": ("the monitor's own share of a core", "%", 0.01),
}


@contextmanager
def live(console: Console) -> Iterator[Watcher]:
    """Show readings as they come: a table that renews itself, or lines where there is no screen."""
    if not console.is_terminal:
        yield lambda sample, card: console.print(escape(line(sample)), highlight=False)
        return
    seen: dict[str, list[float]] = {}
    with Live(console=console, auto_refresh=False) as screen:

        def show(sample: GpuSample, card: Card) -> None:
            screen.update(_live_table(sample, card, seen), refresh=True)

        yield show


def line(sample: GpuSample) -> str:
    """Give one reading as one line; what was not measured is left out."""
    parts = []
    for name, (words, unit, scale) in SHOWN.items():
        value = getattr(sample, FIELDS[name])
        if value is not None and name != "power_all_w":
            parts.append(f"{words} {_number(value / scale)} {unit}")
    return f"{sample.elapsed_s:.1f} s: " + ", ".join(parts)


def print_record(record: MonitorRecord, console: Console) -> None:
    """Print mean, least and greatest of each figure, then what they suggest."""
    console.print(_title(record), highlight=False)
    table = _table("", "mean", "min", "p50", "p95", "max")
    for name, (words, unit, scale) in SHOWN.items():
        stats: Stats | None = getattr(record, name)
        if stats is not None and not _is_repeated(name, record):
            values = (stats.mean, stats.min, stats.p50, stats.p95, stats.max)
            table.add_row(f"{words} ({unit})", *(_number(value / scale) for value in values))
    console.print(table)
    for text in _lines(record):
        console.print(escape(text), highlight=False)


def print_comparison(
    before: MonitorRecord, after: MonitorRecord, console: Console, names: tuple[str, str]
) -> None:
    """Print means and totals of two records side by side, with the difference."""
    table = _table("", *names, "difference", "")
    for name, (words, unit, scale) in {**SHOWN, **TOTALS}.items():
        old, new = _value(before, name), _value(after, name)
        if old is None and new is None:
            continue
        mean = "mean " if name in SHOWN else ""
        table.add_row(f"{mean}{words} ({unit})", *_difference(old, new, scale))
    console.print(table)
    for which, record in zip(names, (before, after), strict=True):
        for text in (*_flags(record), *record.assessment):
            console.print(escape(f"{which}: {text}"), highlight=False)


def _difference(old: float | None, new: float | None, scale: float) -> tuple[str, str, str, str]:
    shown = tuple("unknown" if v is None else _number(v / scale) for v in (old, new))
    if old is None or new is None:
        return shown[0], shown[1], "unknown", ""
    # A share of next to nothing says nothing.
    share = f"{(new - old) / old:+.1%}" if abs(new) < MOST_TIMES * abs(old) else ""
    return shown[0], shown[1], _number((new - old) / scale, sign="+"), share


def _value(record: MonitorRecord, name: str) -> float | None:
    value = getattr(record, name)
    return value.mean if isinstance(value, Stats) else value


def _is_repeated(name: str, record: MonitorRecord) -> bool:
    """Tell a sum over all cards of a machine that has one."""
    return _is_sum(name) and (record.n_gpus or 1) < 2


def _is_sum(name: str) -> bool:
    return "_all_" in name


def _lines(record: MonitorRecord) -> Iterator[str]:
    for name, (words, unit, scale) in TOTALS.items():
        value = getattr(record, name)
        if value is not None and not _is_repeated(name, record):
            yield f"{words}: {_number(value / scale)} {unit}"
    held = {cause: s for cause, s in (record.throttle_s or {}).items() if s > 0}
    if record.throttle_s is not None:
        shown = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in held.items())
        yield f"clocks held back (by {record.throttle_source}): {shown or 'never'}"
    for process in record.processes:
        held_bytes = process.get("memory_used_bytes")
        size = "unknown" if held_bytes is None else f"{held_bytes / GB:.2f} GB"
        name = process.get("name") or "unknown"
        yield f"GPU memory held by {name} (pid {process['pid']}): {size}"
    for reason in dict.fromkeys(record.unavailable.values()):
        names = [name for name, why in record.unavailable.items() if why == reason]
        yield f"not measured ({reason}): {', '.join(names)}"
    for name, count in record.n_lost_readings.items():
        yield f"lost readings: {count} of {name}"
    yield from _flags(record)
    for text in record.assessment:
        yield f"-> {text}"


def _flags(record: MonitorRecord) -> Iterator[str]:
    if record.simulated:
        yield "SIMULATED: these figures come from no real card"
    yield from record.remarks


def _title(record: MonitorRecord) -> str:
    if record.gpu_name is None:
        reason = record.unavailable.get("gpu_name", "unknown")
        return f"[bold]No GPU figures[/]: {escape(reason)}; {record.n_samples} readings"
    several = f", the first of {record.n_gpus}" if (record.n_gpus or 1) > 1 else ""
    return f"[bold]{escape(record.gpu_name)}[/]{several}; {record.n_samples} readings"


def _live_table(sample: GpuSample, card: Card, seen: dict[str, list[float]]) -> Table:
    """Give the figures of now, and of all readings so far their mean, least and greatest."""
    table = _table(
        card.gpu_name or card.unavailable.get("gpu_name", ""), "now", "mean", "min", "max"
    )
    for name, (words, unit, scale) in SHOWN.items():
        value: Any = getattr(sample, FIELDS[name])
        if _is_sum(name) and (card.n_gpus or 1) < 2:
            continue
        if value is not None:
            # A value stands for the time since the one before, as in the summary.
            now_s = sample.elapsed_s
            first_s, before_s, total, least, most = seen.get(
                name, [now_s, now_s, 0.0, value, value]
            )
            total += value * (now_s - before_s)
            seen[name] = [first_s, now_s, total, min(least, value), max(most, value)]
        if name in seen:
            first_s, before_s, total, least, most = seen[name]
            mean = total / (before_s - first_s) if before_s > first_s else value
            shown = (value, mean, least, most)
            cells = ("" if v is None else _number(v / scale) for v in shown)
            table.add_row(f"{words} ({unit})", *cells)
    reasons = ", ".join(sample.throttle_reasons or ())
    table.caption = f"{sample.elapsed_s:.0f} s" + (f"; clocks: {reasons}" if reasons else "")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(escape(first), no_wrap=True)
    for name in others:
        table.add_column(escape(name), justify="right", no_wrap=True)
    return table


def _number(value: float, sign: str = "") -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:{sign},.{digits}f}"


def stderr() -> Console:
    """Give the terminal's error stream, where live figures go."""
    return Console(file=sys.stderr)
