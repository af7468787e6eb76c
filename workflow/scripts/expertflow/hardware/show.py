"""Show a monitor's figures in a terminal: live, at the end, or compared."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from expertflow.core.format import GB, gb
from expertflow.hardware.records import Card, GpuSample, MonitorRecord, Stats
from expertflow.hardware.summary import SERIES, Watcher, compute_stats

MB = 1e6
# Figure: its label, the unit shown, and that unit in ours.
FIGURES = {
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
TOTALS = {
    "energy_j": ("energy", "kJ", 1e3),
    "energy_all_j": ("energy, all visible GPUs", "kJ", 1e3),
    "disk_read_bytes": ("read from disks", "GB", GB),
    "disk_write_bytes": ("written to disks", "GB", GB),
    "wall_s": ("time monitored", "s", 1.0),
    "effective_interval_s": ("time between readings", "s", 1.0),
    "monitor_cpu_fraction": ("the monitor's own share of a core", "%", 0.01),
}
COLUMNS = ("mean", "min", "p50", "p95", "max")
# Readings that a live table summarizes.
N_SHOWN = 1000
# The difference is also shown as a share of the earlier figure, up to this multiple of it.
MAX_TIMES = 100


@contextmanager
def show_live() -> Iterator[Watcher]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda sample, _: console.print(escape(_line(sample)), highlight=False)
        return
    readings: deque[GpuSample] = deque(maxlen=N_SHOWN)
    with Live(console=console, auto_refresh=False) as screen:

        def show(sample: GpuSample, card: Card) -> None:
            readings.append(sample)
            known = {name: compute_stats(readings, SERIES[name]) for name in FIGURES}
            table = _figures(known, card.n_gpus, sample)
            table.title = escape(card.gpu_name or "")
            clocks = ", ".join(sample.throttle_reasons or ())
            table.caption = f"{sample.elapsed_s:.0f} s" + (f"; clocks: {clocks}" if clocks else "")
            screen.update(table, refresh=True)

        yield show


def _line(sample: GpuSample) -> str:
    parts = []
    for name, (words, unit, scale) in FIGURES.items():
        value = getattr(sample, SERIES[name])
        if value is not None and name != "power_all_w":
            parts.append(f"{words} {_number(value / scale)} {unit}")
    return f"{sample.elapsed_s:.1f} s: " + ", ".join(parts)


def _figures(
    known: Mapping[str, Stats | None], n_gpus: int | None, now: GpuSample | None = None
) -> Table:
    table = _table("", *(() if now is None else ("now",)), *COLUMNS)
    for name, (words, unit, scale) in FIGURES.items():
        if (stats := known[name]) is not None and _is_own_figure(name, n_gpus):
            values = [getattr(stats, column) for column in COLUMNS]
            if now is not None:
                values.insert(0, getattr(now, SERIES[name]))
            cells = ("" if value is None else _number(value / scale) for value in values)
            table.add_row(f"{words} ({unit})", *cells)
    return table


def print_record(record: MonitorRecord) -> None:
    console = Console()
    if record.gpu_name is None:
        title = f"[bold]No GPU figures[/]: {escape(record.unavailable.get('gpu_name', 'unknown'))}"
    else:
        several = f", the first of {record.n_gpus}" if (record.n_gpus or 1) > 1 else ""
        title = f"[bold]{escape(record.gpu_name)}[/]{several}"
    console.print(f"{title}; {record.n_samples} readings", highlight=False)
    console.print(_figures({name: getattr(record, name) for name in FIGURES}, record.n_gpus))
    for text in _lines(record):
        console.print(escape(text), highlight=False)


def print_comparison(before: MonitorRecord, after: MonitorRecord, names: tuple[str, str]) -> None:
    console = Console()
    table = _table("", *names, "difference", "")
    for name, (words, unit, scale) in {**FIGURES, **TOTALS}.items():
        values = [getattr(record, name) for record in (before, after)]
        old, new = (v.mean if isinstance(v, Stats) else v for v in values)
        if old is None and new is None:
            continue
        cells = ["unknown" if v is None else _number(v / scale) for v in (old, new)]
        difference, share = "unknown", ""
        if old is not None and new is not None:
            difference = _number((new - old) / scale, sign="+")
            # A share of almost nothing is meaningless.
            share = f"{(new - old) / old:+.1%}" if abs(new) < MAX_TIMES * abs(old) else ""
        mean = "mean " if name in FIGURES else ""
        table.add_row(f"{mean}{words} ({unit})", *cells, difference, share)
    console.print(table)
    for which, record in zip(names, (before, after), strict=True):
        for text in (*_flags(record), *record.assessment):
            console.print(escape(f"{which}: {text}"), highlight=False)


def _lines(record: MonitorRecord) -> Iterator[str]:
    for name, (words, unit, scale) in TOTALS.items():
        value = getattr(record, name)
        if value is not None and _is_own_figure(name, record.n_gpus):
            yield f"{words}: {_number(value / scale)} {unit}"
    if record.throttle_s is not None:
        shown = ", ".join(f"{cause} {s:.1f} s" for cause, s in record.throttle_s.items() if s > 0)
        yield f"clocks held back: {shown or 'never'}"
    for process in record.processes:
        n_bytes, name = process["memory_used_bytes"], process["name"] or "unknown"
        size = "unknown" if n_bytes is None else gb(n_bytes, 2)
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
        yield "SIMULATED: these figures are not from a real card"
    yield from record.remarks


def _is_own_figure(name: str, n_gpus: int | None) -> bool:
    return "_all_" not in name or (n_gpus or 1) > 1


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(escape(name), justify="right" if i else "left", no_wrap=True)
    return table


def _number(value: float, sign: str = "") -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:{sign},.{digits}f}"
