"""Describe a card, sum up a series of its readings, and say what the figures suggest.

The driver's utilization is called what it is: "some kernel was running".
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict, fields, replace

from expertflow.hardware.nvml import Gpus
from expertflow.hardware.records import Card, GpuSample, MonitorRecord, Stats
from expertflow.hardware.sampler import SamplingInterval

# Figure of the record: field of a reading.
SERIES = {f.name: f.name for f in fields(MonitorRecord) if f.type == Stats | None}
SERIES["any_kernel_percent"] = "utilization_percent"
COUNTER, SAMPLED = "counter", "sampled reasons"
# Causes of held-back clocks. Idleness and clocks that somebody set are no throttling.
CAUSES = {
    "sw_power_cap": "power",
    "hw_power_brake": "power",
    "sw_thermal": "thermal",
    "hw_thermal": "thermal",
    "sync_boost": "sync_boost",
    "board_limit": "board_limit",
    "reliability": "reliability",
}
NO_SAMPLES = "no samples were taken"
MIXED = "part of the samples are simulated"
# Thresholds of remarks; those without a source are judgment. Fewer readings say nothing.
ENOUGH_SAMPLES = 10
# Source systems' bar for utilization; here it only says that the card often had nothing to do.
OFTEN_IDLE_PERCENT = 60.0
BUSY_PERCENT, LOW_POWER_FRACTION = 90.0, 0.6
TENSOR_PERCENT, SM_PERCENT = 25.0, 80.0
FULL_FRACTION = 0.95
THROTTLED_FRACTION = 0.01
NEAR_LIMIT_C = 3.0


# What a record says of a card; null without one.
GPU_FIGURES = (
    *("gpu_name", "driver", "memory_total_bytes", "power_limit_w", "temperature_limits_c"),
    *(name for name in SERIES if name not in ("cpu_percent", "ram_used_bytes")),
    *("energy_j", "energy_all_j", "energy_source", "throttle_s", "throttle_source", "n_gpus"),
)
# What is asked under another name than the record's.
OTHERWISE = {
    "processes.compute": ("processes",),
    "throttle_reasons": ("throttle_s", "throttle_source"),
    "energy_j": ("energy_source", "energy_all_j"),
    "power_w": ("power_all_w",),
}
# Is shown each reading of a card.
Watcher = Callable[[GpuSample, Card], None]


def no_card(reason: str) -> Card:
    return Card(unavailable=dict.fromkeys(GPU_FIGURES, reason))


def describe(gpus: Gpus) -> Card:
    if not gpus.devices:
        return no_card(gpus.reason or "no GPU")
    first = gpus.devices[0]
    known = {n: first.figure(n) for n in ("gpu_name", "memory_total_bytes", "power_limit_w")}
    known["temperature_limits_c"] = first.temperature_limits_c()
    return Card(
        **known,
        driver=gpus.driver,
        n_gpus=len(gpus.devices),
        simulated=gpus.simulated,
        unavailable={name: first.reason(name) for name, value in known.items() if value is None},
        remarks=gpus.remarks,
    )


def at_the_end(card: Card, gpus: Gpus) -> Card:
    if not gpus.devices:
        return card
    processes = tuple(p for device in gpus.devices for p in device.processes())
    told = gpus.devices[0].unavailable
    known = MonitorRecord.__struct_fields__
    reasons = {name: reason for name, reason in told.items() if name in known}
    for what, names in OTHERWISE.items():
        if what in told:
            reasons |= dict.fromkeys(names, told[what])
    return replace(card, processes=processes, unavailable={**reasons, **card.unavailable})


def summarize(
    samples: Sequence[GpuSample],
    *,
    card: Card,
    interval: SamplingInterval,
    monitor_cpu_fraction: float | None = None,
    remarks: Sequence[str] = (),
) -> MonitorRecord:
    figures: dict[str, Any] = {
        name: stats([(s.elapsed_s, s.starts, getattr(s, field)) for s in samples])
        for name, field in SERIES.items()
    }
    throttle_s, throttle_source = _throttled(samples)
    gaps = [later.elapsed_s - earlier.elapsed_s for earlier, later in _pairs(samples)]
    figures |= {
        "energy_j": _spent([(s.starts, s.energy_j) for s in samples]),
        "energy_all_j": _spent([(s.starts, s.energy_all_j) for s in samples]),
        "disk_read_bytes": _total(s.disk_read_bytes for s in samples),
        "disk_write_bytes": _total(s.disk_write_bytes for s in samples),
        "throttle_s": throttle_s,
        "throttle_source": throttle_source,
        "effective_interval_s": statistics.median(gaps) if gaps else None,
        "wall_s": round(sum(gaps), 3) if gaps else None,
        "monitor_cpu_fraction": monitor_cpu_fraction,
    }
    figures["energy_source"] = None if figures["energy_j"] is None else COUNTER
    simulated = {s.simulated for s in samples} or {card.simulated}
    # A figure of several questions is lost once in a reading, however many of them failed.
    lost = Counter(name for s in samples for name in {key.split(".")[0] for key in s.lost})
    mixed = (MIXED,) if len(simulated) > 1 else ()
    figures |= {
        "simulated": any(simulated),
        "remarks": (*card.remarks, *interval.remarks(), *mixed, *remarks),
        "unavailable": _reasons(figures, samples, card),
    }
    record = MonitorRecord(
        configured_interval_s=interval.configured_s,
        n_samples=len(samples),
        n_lost_readings=dict(sorted(lost.items())),
        epoch_s=interval.epoch_s,
        assessment=(),
        **{**asdict(card), **figures},
    )
    n_known = sum(s.utilization_percent is not None for s in samples)
    return replace(record, assessment=tuple(_assess(record) if n_known >= ENOUGH_SAMPLES else ()))


def stats(readings: Sequence[tuple[float, bool, float | None]]) -> Stats | None:
    """Return the spread over time of (moment, starts a stretch, value); null where none is known.

    A value stands for the time since the one before it in its stretch.
    """
    known = sorted(_weighted(readings))
    if not known:
        return None
    total_s = sum(seconds for _, seconds in known)
    if total_s == 0:
        # Only first readings, which stand for no time: all alike.
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
        p5=at(0.05),
        p50=at(0.5),
        p95=at(0.95),
    )


def _weighted(
    readings: Sequence[tuple[float, bool, float | None]],
) -> Iterator[tuple[float, float]]:
    since_s: float | None = None
    for moment_s, starts, value in readings:
        if starts or since_s is None:
            since_s = moment_s
        if value is not None:
            yield float(value), moment_s - since_s
            since_s = moment_s


def _pairs(samples: Sequence[GpuSample]) -> Iterator[tuple[GpuSample, GpuSample]]:
    return ((a, b) for a, b in pairwise(samples) if not b.starts)


def _spent(readings: Sequence[tuple[bool, float | None]]) -> float | None:
    """Add up what a counter rose by; null without two readings of one stretch.

    A lost reading in between loses nothing. A counter that went back (its driver was loaded again)
    starts afresh there.
    """
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


def _throttled(samples: Sequence[GpuSample]) -> tuple[dict[str, float] | None, str | None]:
    causes = sorted({cause for s in samples for cause in s.violation_s or {}})
    counted = {}
    for cause in causes:
        readings = [(s.starts, (s.violation_s or {}).get(cause)) for s in samples]
        if (seconds := _spent(readings)) is not None:
            counted[cause] = seconds
    if {"power", "thermal"} <= counted.keys():
        return counted, COUNTER
    seen = dict.fromkeys((*dict.fromkeys(CAUSES.values()), "hw_slowdown"), 0.0)
    known = [(a, b) for a, b in _pairs(samples) if b.throttle_reasons is not None]
    for before, now in known:
        for cause in _causes(now.throttle_reasons or ()):
            seen[cause] += now.elapsed_s - before.elapsed_s
    seen = {cause: round(seconds, 3) for cause, seconds in seen.items()}
    return (seen, SAMPLED) if known else (None, None)


def _causes(reasons: Sequence[str]) -> set[str]:
    found = {CAUSES[reason] for reason in reasons if reason in CAUSES}
    explained = {"hw_thermal", "hw_power_brake"} & set(reasons)
    return found | ({"hw_slowdown"} if "hw_slowdown" in reasons and not explained else set())


def _total(values: Iterator[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _reasons(figures: dict[str, Any], samples: Sequence[GpuSample], card: Card) -> dict[str, str]:
    last = {name: reason for s in samples for name, reason in s.lost.items()}
    for what in [what for what in OTHERWISE if what in last and figures.get(what) is None]:
        last |= dict.fromkeys(OTHERWISE[what], last[what])
    reasons = {k: v for k, v in card.unavailable.items() if figures.get(k) is None}
    fallback = NO_SAMPLES if not samples else "too few samples for a difference"
    own = {
        "cpu_percent": "too few samples for a share of time",
        "disk_read_bytes": "this machine keeps no disk counters, or too few samples",
        "disk_write_bytes": "this machine keeps no disk counters, or too few samples",
        "monitor_cpu_fraction": "not measured for this series",
        "energy_source": reasons.get("energy_j", fallback),
        "energy_all_j": "a card does not count its energy",
        "power_all_w": "a card does not tell its power",
    }
    for name in (name for name, value in figures.items() if value is None):
        reason = own.get(name, fallback) if samples else NO_SAMPLES
        reason = f"every reading failed: {last[name]}" if name in last else reason
        reasons.setdefault(name, reason)
    return dict(sorted(reasons.items()))


def _assess(record: MonitorRecord) -> Iterator[str]:
    yield from _assess_use(record)
    used, total = record.memory_used_bytes, record.memory_total_bytes
    if used is not None and total and used.max > FULL_FRACTION * total:
        yield (
            f"memory was {used.max / total:.0%} full: a smaller micro-batch at the same global"
            " batch leaves room"
        )
    lost_s, wall_s = (record.throttle_s or {}).get("thermal"), record.wall_s
    if lost_s is not None and wall_s and lost_s > THROTTLED_FRACTION * wall_s:
        yield (
            f"heat held the clocks back {lost_s / wall_s:.1%} of the time (by"
            f" {record.throttle_source}): improve cooling, or rent another host"
        )
    limits, seen = record.temperature_limits_c or {}, record.temperature_c
    # What the maker wants it to stay below, else where it slows down. A cool card is no fault.
    name = next((name for name in ("max_operating", "slowdown") if name in limits), None)
    if seen is not None and name is not None and seen.max > limits[name] - NEAR_LIMIT_C:
        yield (
            f"the card reached {seen.max:.0f} °C and its own limit ({name.replace('_', ' ')}) is"
            f" {limits[name]:.0f} °C: improve cooling before a long run"
        )


def _assess_use(record: MonitorRecord) -> Iterator[str]:
    busy, power, limit = record.any_kernel_percent, record.power_w, record.power_limit_w
    if busy is not None and busy.mean < OFTEN_IDLE_PERCENT:
        yield (
            f"no kernel at all was running {100 - busy.mean:.0f} % of the time (any kernel"
            f" {busy.mean:.0f} %): look at data wait, evaluation, saving and start-up before the"
            " model"
        )
    if busy is not None and power is not None and limit and busy.mean > BUSY_PERCENT:
        if power.mean < LOW_POWER_FRACTION * limit:
            yield (
                f"some kernel was running {busy.mean:.0f} % of the time, yet power was"
                f" {power.mean / limit:.0%} of its limit: small kernels or waits inside them;"
                " compile the model, or raise the micro-batch"
            )
    tensor, sm = record.tensor_active_percent, record.sm_active_percent
    if tensor is not None and sm is not None:
        if tensor.mean < TENSOR_PERCENT and sm.mean > SM_PERCENT:
            yield (
                f"multiprocessors were busy {sm.mean:.0f} % and tensor cores {tensor.mean:.0f} % of"
                " the time: kernels wait for memory; fuse the loss and norms, or raise the"
                " micro-batch"
            )
