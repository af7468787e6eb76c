"""Show in a terminal what a machine is, and a monitor's figures: live, at the end, compared."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from expertflow.core.format import GB, gb
from expertflow.hardware.records import (
    Card,
    GpuSample,
    GpuSeen,
    MachineFacts,
    MonitorRecord,
    ScratchFacts,
    Stats,
)
from expertflow.hardware.summary import SERIES, Watcher

MB = 1e6
# Figure: its name in words, its unit, and how many of ours are one of it.
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
    "wall_s": ("time watched", "s", 1.0),
    "effective_interval_s": ("time between readings", "s", 1.0),
    "monitor_cpu_fraction": ("the monitor's own share of a core", "%", 0.01),
}
# The difference is also shown as a share of the figure before, up to so many times of it.
MAX_TIMES = 100


@contextmanager
def live(console: Console) -> Iterator[Watcher]:
    if not console.is_terminal:
        yield lambda sample, _: console.print(escape(_line(sample)), highlight=False)
        return
    sums: dict[str, _Sums] = {}
    with Live(console=console, auto_refresh=False) as screen:
        yield lambda sample, card: screen.update(_live_table(sums, sample, card), refresh=True)


def _line(sample: GpuSample) -> str:
    parts = []
    for name, (words, unit, scale) in FIGURES.items():
        value = getattr(sample, SERIES[name])
        if value is not None and name != "power_all_w":
            parts.append(f"{words} {_number(value / scale)} {unit}")
    return f"{sample.elapsed_s:.1f} s: " + ", ".join(parts)


class _Sums(Struct):
    first_s: float
    last_s: float
    min: float
    max: float
    total: float = 0.0

    def add(self, value: float, now_s: float) -> None:
        self.total += value * (now_s - self.last_s)
        self.last_s = now_s
        self.min, self.max = min(value, self.min), max(value, self.max)


def _live_table(sums: dict[str, _Sums], sample: GpuSample, card: Card) -> Table:
    title = card.gpu_name or card.unavailable.get("gpu_name", "")
    table = _table(title, "now", "mean", "min", "max")
    for name, (words, unit, scale) in FIGURES.items():
        value: float | None = getattr(sample, SERIES[name])
        if value is not None and _is_own_figure(name, card.n_gpus):
            now_s = sample.elapsed_s
            sums.setdefault(name, _Sums(now_s, now_s, value, value)).add(value, now_s)
        if (known := sums.get(name)) is not None:
            span_s = known.last_s - known.first_s
            mean = known.total / span_s if span_s > 0 else value
            shown = (value, mean, known.min, known.max)
            cells = ("" if v is None else _number(v / scale) for v in shown)
            table.add_row(f"{words} ({unit})", *cells)
    reasons = ", ".join(sample.throttle_reasons or ())
    table.caption = f"{sample.elapsed_s:.0f} s" + (f"; clocks: {reasons}" if reasons else "")
    return table


def print_record(record: MonitorRecord, console: Console) -> None:
    if record.gpu_name is None:
        reason = record.unavailable.get("gpu_name", "unknown")
        title = f"[bold]No GPU figures[/]: {escape(reason)}"
    else:
        several = f", the first of {record.n_gpus}" if (record.n_gpus or 1) > 1 else ""
        title = f"[bold]{escape(record.gpu_name)}[/]{several}"
    console.print(f"{title}; {record.n_samples} readings", highlight=False)
    table = _table("", "mean", "min", "p50", "p95", "max")
    for name, (words, unit, scale) in FIGURES.items():
        stats: Stats | None = getattr(record, name)
        if stats is not None and _is_own_figure(name, record.n_gpus):
            values = (stats.mean, stats.min, stats.p50, stats.p95, stats.max)
            table.add_row(f"{words} ({unit})", *(_number(value / scale) for value in values))
    console.print(table)
    for text in _lines(record):
        console.print(escape(text), highlight=False)


def print_comparison(
    before: MonitorRecord, after: MonitorRecord, console: Console, names: tuple[str, str]
) -> None:
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
            # A share of next to nothing says nothing.
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
        held = {cause: s for cause, s in record.throttle_s.items() if s > 0}
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


def _is_own_figure(name: str, n_gpus: int | None) -> bool:
    return "_all_" not in name or (n_gpus or 1) > 1


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(escape(first), no_wrap=True)
    for name in others:
        table.add_column(escape(name), justify="right", no_wrap=True)
    return table


def _number(value: float, sign: str = "") -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:{sign},.{digits}f}"


def print_machine(machine: MachineFacts, console: Console) -> None:
    if machine.simulated:
        console.print("SIMULATED: these figures come from no real card")
    for words, value in _facts(machine):
        console.print(f"{words:<10}{escape(value)}", highlight=False)
    for text in machine.remarks:
        console.print(escape(text), highlight=False)
    if machine.scratch:
        console.print(_disks(machine.scratch))


def _facts(machine: MachineFacts) -> Iterator[tuple[str, str]]:
    quota = machine.cpu_quota_cpus
    cores = machine.n_cpus_physical
    yield (
        "CPU",
        f"{machine.cpu_model or 'unknown'}: {'unknown' if cores is None else cores} cores,"
        f" {machine.n_cpus_logical} threads, {machine.n_cpus_usable} usable (affinity"
        f" {machine.n_cpus_affinity}, quota {'none' if quota is None else f'{quota:g}'})",
    )
    limit = machine.ram_limit_bytes
    yield (
        "RAM",
        f"{gb(machine.ram_total_bytes)}, {gb(machine.ram_usable_bytes)} usable"
        f" (limit {'none' if limit is None else gb(limit)})",
    )
    if not machine.gpus:
        yield "GPU", f"none ({machine.unavailable['gpus']})"
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}", _card(gpu)
    if machine.driver is not None:
        yield "driver", machine.driver


def _card(gpu: GpuSeen) -> str:
    known = [gpu.name or "name unknown"]
    if gpu.memory_total_bytes is not None:
        known.append(gb(gpu.memory_total_bytes))
    if gpu.memory_free_bytes is not None:
        known.append(f"{gb(gpu.memory_free_bytes)} free")
    if gpu.compute_capability is not None:
        known.append(f"compute capability {gpu.compute_capability}")
    for name, able in (("bf16", gpu.supports_bf16), ("TF32", gpu.supports_tf32)):
        if able is not None:
            known.append(name if able else f"no {name}")
    if gpu.power_limit_w is not None:
        known.append(f"limit {gpu.power_limit_w:.0f} W")
    known.append(f"listed as {gpu.listed_as}" if gpu.listed_as else "not listed: peaks unknown")
    return ", ".join(known)


def _disks(places: tuple[ScratchFacts, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("place", "because of", "kind", "free GB", "read MB/s", "how"):
        right = name in ("free GB", "read MB/s")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for place in places:
        speed = place.read_bytes_per_s
        # A virtual disk is often said to spin, whatever is behind it.
        spins = {True: ", said to spin", False: ", solid state", None: ""}[place.is_rotational]
        table.add_row(
            escape(place.path),
            escape(place.asked_by),
            f"{place.file_system or 'unknown'}{spins}",
            f"{place.free_bytes / GB:,.1f}",
            "memory" if place.is_memory else "unknown" if speed is None else f"{speed / MB:,.0f}",
            escape(place.read_method),
        )
    return table
