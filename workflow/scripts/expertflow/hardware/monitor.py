"""Sample the machine beside whatever runs on it, and sum up what was seen.

On a machine without an NVIDIA GPU the card's figures are null with the reason, and CPU and memory
are recorded all the same. Energy is the difference of the card's own counter, not a sum of powers.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from expertflow.core.files import read_json_lines
from expertflow.core.records import to_json
from expertflow.hardware.nvml import NO_DRIVER, Device, open_device
from expertflow.hardware.records import GpuSample, MonitorRecord, Stats

GPU_FIGURES = (
    "gpu_name",
    "driver",
    "memory_total_bytes",
    "power_limit_w",
    "any_kernel_percent",
    "memory_used_bytes",
    "temperature_c",
    "power_w",
    "energy_j",
)
# Bands that earlier set-ups worked by; the report shows them as reference.
BUSY_PERCENT, FULL_FRACTION = 60.0, 0.95


def take_sample(device: Device | None, *, elapsed_s: float) -> GpuSample:
    """Read everything once."""
    return GpuSample(
        elapsed_s=round(elapsed_s, 3),
        utilization_percent=device.utilization_percent() if device else None,
        memory_used_bytes=device.memory_used_bytes() if device else None,
        temperature_c=device.temperature_c() if device else None,
        power_w=device.power_w() if device else None,
        energy_j=device.energy_j() if device else None,
        cpu_percent=psutil.cpu_percent(interval=None),
        ram_used_bytes=psutil.virtual_memory().used,
    )


def monitor(
    output: Path,
    *,
    interval_s: float,
    duration_s: float | None,
    offset_s: float,
    stop: Callable[[], bool],
) -> MonitorRecord:
    """Append one JSON line per sample to ``output`` until the time is over or ``stop`` says so.

    ``offset_s`` is where this stretch starts on the run's clock; a resumed run goes on with its
    file, and the summary covers all of it.
    """
    device = open_device()
    psutil.cpu_percent(interval=None)
    start = time.monotonic()
    n = 0
    with output.open("a" if offset_s else "w", encoding="utf-8") as stream:
        while not stop() and (duration_s is None or time.monotonic() - start < duration_s):
            sample = take_sample(device, elapsed_s=offset_s + time.monotonic() - start)
            if n == 0:
                # Where a stretch begins the energy counter is left out: no difference is taken
                # across a pause, a reboot, or to another card.
                sample = replace(sample, energy_j=None)
            stream.write(json.dumps(to_json(sample)) + "\n")
            stream.flush()
            n += 1
            due = start + n * interval_s
            while not stop() and (left := due - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))
    return summarise(read_samples(output), interval_s=interval_s, device=device)


def summarise(
    samples: Sequence[GpuSample], *, interval_s: float, device: Device | None
) -> MonitorRecord:
    """Sum up samples; figures without readings are null and have a reason."""
    unavailable = dict(device.unavailable) if device else dict.fromkeys(GPU_FIGURES, NO_DRIVER)
    facts = _device_facts(device)
    stats: dict[str, Any] = {
        "any_kernel_percent": _stats([s.utilization_percent for s in samples]),
        "memory_used_bytes": _stats([s.memory_used_bytes for s in samples]),
        "temperature_c": _stats([s.temperature_c for s in samples]),
        "power_w": _stats([s.power_w for s in samples]),
        "cpu_percent": _stats([s.cpu_percent for s in samples[1:]]),
        "ram_used_bytes": _stats([s.ram_used_bytes for s in samples]),
    }
    spent = [
        b.energy_j - a.energy_j
        for a, b in itertools.pairwise(samples)
        if a.energy_j is not None and b.energy_j is not None
    ]
    gaps = sorted(b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(samples))
    for name, value in stats.items():
        if value is None:
            unavailable.setdefault(name, "no samples were taken")
    return MonitorRecord(
        configured_interval_s=interval_s,
        effective_interval_s=gaps[len(gaps) // 2] if gaps else None,
        n_samples=len(samples),
        simulated=False,
        energy_j=sum(spent) if spent else None,
        assessment=tuple(assess(stats["any_kernel_percent"], stats["memory_used_bytes"], facts)),
        unavailable=unavailable,
        processes=tuple(device.processes()) if device else (),
        **facts,
        **stats,
    )


def assess(busy: Stats | None, memory: Stats | None, facts: dict[str, Any]) -> list[str]:
    """Say in words what the figures suggest; nothing where nothing was measured."""
    remarks = []
    if busy is not None and busy.mean < BUSY_PERCENT:
        remarks.append(
            f"some kernel was running {busy.mean:.0f} % of the time: look at data wait, evaluation"
            " and start-up before the model"
        )
    total = facts["memory_total_bytes"]
    if memory is not None and total and memory.max > FULL_FRACTION * total:
        remarks.append(
            f"memory was {memory.max / total:.0%} full: a smaller micro-batch at the same global"
            " batch leaves room"
        )
    return remarks


def read_samples(path: Path) -> list[GpuSample]:
    """Read a file of samples."""
    return [GpuSample(**sample) for sample in read_json_lines(path)]


def _device_facts(device: Device | None) -> dict[str, Any]:
    return {
        "gpu_name": device.name() if device else None,
        "driver": device.driver() if device else None,
        "memory_total_bytes": device.memory_total_bytes() if device else None,
        "power_limit_w": device.power_limit_w() if device else None,
    }


def _stats(values: Sequence[float | None]) -> Stats | None:
    known = sorted(float(v) for v in values if v is not None)
    if not known:
        return None

    def at(fraction: float) -> float:
        return known[min(len(known) - 1, int(fraction * len(known)))]

    mean = sum(known) / len(known)
    return Stats(mean=mean, min=known[0], max=known[-1], p5=at(0.05), p50=at(0.5), p95=at(0.95))
