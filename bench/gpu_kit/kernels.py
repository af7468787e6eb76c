"""GPU time of a step: kernels by kind, and the gaps between them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from expertflow.report.profile import kind_of
from expertflow.train.profiler import ANNOTATIONS
from gpu_kit.ceilings import wait

N_LONGEST = 24


def profile_calls(steps: Any, device: str, *, n_steps: int) -> dict[str, Any]:
    """Profile some calls of ``steps``; on a CPU, operators instead of kernels."""
    cuda = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    wait(device)
    with profile(activities=activities) as profiler:
        for _ in range(n_steps):
            steps()
        wait(device)
    spans = [
        (event.name, event.time_range.start, event.time_range.end, self_us(event, cuda))
        for event in profiler.events()
        if (event.device_type == torch.autograd.DeviceType.CUDA) == cuda
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(ANNOTATIONS)
    ]
    return summary(spans, n_steps=n_steps)


def self_us(event: Any, cuda: bool) -> float:
    """Return the time of a kernel, or of an operator without those it calls."""
    span = event.time_range
    return float(span.end - span.start if cuda else event.self_cpu_time_total)


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time during which any span runs.

    >>> busy_us([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def summary(spans: list[tuple[str, float, float, float]], *, n_steps: int) -> dict[str, Any]:
    """Sum up kernels (name, start, end, microseconds) by kind; shares are of the total span."""
    if not spans:
        return {"failed": "the profiler saw no kernel"}
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    for name, _, _, taken in spans:
        by_kind[kind_of(name)] += taken
        by_name[name] += taken
    whole = max(end for _, _, end, _ in spans) - min(start for _, start, _, _ in spans)
    gaps = whole - busy_us((start, end) for _, start, end, _ in spans)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:N_LONGEST]
    return {
        "span_s_per_step": whole / n_steps / 1e6,
        "share": {kind: taken / whole for kind, taken in sorted(by_kind.items())},
        "gap_share": gaps / whole,
        "n_kernels_per_step": len(spans) / n_steps,
        "longest": {name[:90]: taken / whole for name, taken in longest},
    }
