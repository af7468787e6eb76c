"""Describe a card, summarize a series of its readings, and assess the figures."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict, fields, replace

from expertflow.core.format import percent
from expertflow.hardware.nvml import Gpus
from expertflow.hardware.records import Card, GpuSample, MonitorRecord, Stats

# Figure of the record: field of a reading.
SERIES = {f.name: f.name for f in fields(MonitorRecord) if f.type == Stats | None}
SERIES["any_kernel_percent"] = "utilization_percent"
# Causes of throttled clocks. Idleness and clocks that somebody set are not throttling.
CAUSES = {
    "sw_power_cap": "power",
    "hw_power_brake": "power",
    "sw_thermal": "thermal",
    "hw_thermal": "thermal",
    "sync_boost": "sync_boost",
    "board_limit": "board_limit",
    "reliability": "reliability",
}
NO_SAMPLES, TOO_FEW = "no samples were taken", "too few samples for a difference"
# Thresholds of remarks; those without a source are judgments. Fewer readings show nothing.
ENOUGH_SAMPLES = 10
# Source systems' bar for utilization; here it only means that the card was often idle.
OFTEN_IDLE_PERCENT = 60.0
FULL_FRACTION = 0.95
THROTTLED_FRACTION = 0.01
NEAR_LIMIT_C = 3.0
# Why a figure may be null: for the machine, and for a card that does not report it.
NO_DISKS = "this machine keeps no disk counters, or too few samples"
MACHINE = {
    "cpu_percent": "too few samples for a share of time",
    "ram_used_bytes": TOO_FEW,
    "disk_read_bytes": NO_DISKS,
    "disk_write_bytes": NO_DISKS,
    "effective_interval_s": TOO_FEW,
    "wall_s": TOO_FEW,
    "monitor_cpu_fraction": "not measured for this series",
}
UNSAID = {
    "energy_all_j": "a card does not count its energy",
    "power_all_w": "a card does not report its power",
}
# Figures that are queried under another name.
QUESTIONS = {
    "processes": "processes.compute",
    "throttle_s": "throttle_reasons",
    "energy_source": "energy_j",
    "energy_all_j": "energy_j",
    "power_all_w": "power_w",
}
# Called with each reading of a card.
Watcher = Callable[[GpuSample, Card], None]


def no_card(reason: str) -> Card:
    return Card(unavailable={"n_gpus": reason})


def describe_card(gpus: Gpus) -> Card:
    if not gpus.devices:
        return no_card(gpus.reason or "no GPU")
    names = ("gpu_name", "memory_total_bytes", "power_limit_w", "temperature_limits_c")
    known, unavailable = gpus.devices[0].read_figures(*names)
    return Card(
        **known,
        driver=gpus.driver,
        n_gpus=len(gpus.devices),
        simulated=gpus.simulated,
        unavailable=unavailable,
        remarks=gpus.remarks,
    )


def add_processes(card: Card, gpus: Gpus) -> Card:
    """Add what is known only at the end: who uses memory, and what the card never reported."""
    if not gpus.devices:
        return card
    processes = tuple(p for device in gpus.devices for p in device.list_processes())
    unavailable = {**gpus.devices[0].unavailable, **card.unavailable}
    return replace(card, processes=processes, unavailable=unavailable)


def summarize(
    samples: Sequence[GpuSample],
    *,
    card: Card,
    configured_s: float | None = None,
    monitor_cpu_fraction: float | None = None,
) -> MonitorRecord:
    gaps = [later.elapsed_s - earlier.elapsed_s for earlier, later in _pairs(samples)]
    energy_j = _rise((s.starts, s.energy_j) for s in samples)
    simulated = card.simulated or any(s.simulated for s in samples)
    known: dict[str, Any] = asdict(card) | {"simulated": simulated}
    known |= {name: compute_stats(samples, field) for name, field in SERIES.items()}
    record = MonitorRecord(
        **known,
        energy_j=energy_j,
        energy_source=None if energy_j is None else "counter",
        energy_all_j=_rise((s.starts, s.energy_all_j) for s in samples),
        disk_read_bytes=_total(s.disk_read_bytes for s in samples),
        disk_write_bytes=_total(s.disk_write_bytes for s in samples),
        throttle_s=_throttling(samples),
        configured_interval_s=configured_s,
        effective_interval_s=statistics.median(gaps) if gaps else None,
        wall_s=round(sum(gaps), 3) if gaps else None,
        monitor_cpu_fraction=monitor_cpu_fraction,
        n_samples=len(samples),
        n_lost_readings=dict(sorted(Counter(name for s in samples for name in s.lost).items())),
        assessment=(),
    )
    n_known = sum(s.utilization_percent is not None for s in samples)
    return replace(
        record,
        unavailable=_reasons(record, samples),
        assessment=tuple(_assess(record)) if n_known >= ENOUGH_SAMPLES else (),
    )


def compute_stats(samples: Sequence[GpuSample], field: str) -> Stats | None:
    """Return a field's statistics, values weighted by the time since the last; null if none."""
    # Readings at 0, 1 and 4 s count for 0, 1 and 3 s.
    known, since_s = [], 0.0
    for i, sample in enumerate(samples):
        if sample.starts or i == 0:
            since_s = sample.elapsed_s
        value = getattr(sample, field)
        if value is not None:
            known.append((float(value), sample.elapsed_s - since_s))
            since_s = sample.elapsed_s
    if not known:
        return None
    known.sort()
    total_s = sum(seconds for _, seconds in known)
    if total_s == 0:
        # Only first readings, which cover no time: equal weights.
        known, total_s = [(value, 1.0) for value, _ in known], float(len(known))

    def at(fraction: float) -> float:
        reached_s = 0.0
        for value, seconds in known:
            reached_s += seconds
            if reached_s >= fraction * total_s:
                return value
        return known[-1][0]

    return Stats(
        mean=sum(value * seconds for value, seconds in known) / total_s,
        min=known[0][0],
        max=known[-1][0],
        p50=at(0.5),
        p95=at(0.95),
    )


def _pairs(samples: Sequence[GpuSample]) -> Iterator[tuple[GpuSample, GpuSample]]:
    return ((a, b) for a, b in pairwise(samples) if not b.starts)


def _rise(readings: Iterable[tuple[bool, float | None]]) -> float | None:
    """Add up a counter's increases, ignoring resets; null without two readings."""
    total, before, found = 0.0, None, False
    for starts, value in readings:
        if starts:
            before = None
        if value is None:
            continue
        if before is not None and value >= before:
            total, found = total + value - before, True
        before = value
    return round(total, 3) if found else None


def _throttling(samples: Sequence[GpuSample]) -> dict[str, float] | None:
    """Return the seconds of throttled readings by cause; null if no reading had the reasons."""
    seen = dict.fromkeys((*CAUSES.values(), "hw_slowdown"), 0.0)
    known = [(a, b) for a, b in _pairs(samples) if b.throttle_reasons is not None]
    for before, now in known:
        reasons = set(now.throttle_reasons or ())
        found = {CAUSES[reason] for reason in reasons & CAUSES.keys()}
        # Hardware slowdowns with a known cause are counted under it.
        if "hw_slowdown" in reasons and not reasons & {"hw_thermal", "hw_power_brake"}:
            found.add("hw_slowdown")
        for cause in found:
            seen[cause] += now.elapsed_s - before.elapsed_s
    return {cause: round(seconds, 3) for cause, seconds in seen.items()} if known else None


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _reasons(record: MonitorRecord, samples: Sequence[GpuSample]) -> dict[str, str]:
    """Return why each null figure is null, as far as the card, a reading or the series shows."""
    lost = {name: f"every reading failed: {why}" for s in samples for name, why in s.lost.items()}
    known, reasons = lost | record.unavailable, {}
    without_card = known.get("n_gpus") if record.n_gpus is None else None
    for name, value in asdict(record).items():
        question = QUESTIONS.get(name, name)
        # An empty list of processes is null only if the card does not list them.
        # Without a configured interval, the monitor chose one.
        if name == "configured_interval_s" or (
            value is not None and (value != () or question not in known)
        ):
            continue
        # The first of several cards may have answered where another did not.
        if getattr(record, question, None) is not None:
            question = name
        reason = known.get(name) or known.get(question)
        if name not in MACHINE:
            reason = reason or without_card
        if name not in Card.__struct_fields__:
            reason = reason or ((MACHINE | UNSAID).get(name, TOO_FEW) if samples else NO_SAMPLES)
        if reason is not None:
            reasons[name] = reason
    return dict(sorted(reasons.items()))


def _assess(record: MonitorRecord) -> Iterator[str]:
    busy = record.any_kernel_percent
    if busy is not None and busy.mean < OFTEN_IDLE_PERCENT:
        yield (
            f"no kernel at all was running {100 - busy.mean:.0f} % of the time (any kernel"
            f" {busy.mean:.0f} %): check data wait, evaluation, saving and startup before the"
            " model"
        )
    used, total = record.memory_used_bytes, record.memory_total_bytes
    if used is not None and total and used.max > FULL_FRACTION * total:
        yield (
            f"memory was {percent(used.max / total, 0)} full: a smaller micro-batch at the same"
            " global batch leaves room"
        )
    lost_s, wall_s = (record.throttle_s or {}).get("thermal"), record.wall_s
    if lost_s is not None and wall_s and lost_s > THROTTLED_FRACTION * wall_s:
        yield (
            f"heat held the clocks back {percent(lost_s / wall_s)} of the time:"
            " improve cooling, or rent another host"
        )
    limits, seen = record.temperature_limits_c or {}, record.temperature_c
    # The maker's maximum, else where it slows down. A cool card is not a fault.
    name = next((name for name in ("max_operating", "slowdown") if name in limits), None)
    if seen is not None and name is not None and seen.max > limits[name] - NEAR_LIMIT_C:
        yield (
            f"the card reached {seen.max:.0f} °C and its limit ({name.replace('_', ' ')}) is"
            f" {limits[name]:.0f} °C: improve cooling before a long run"
        )
