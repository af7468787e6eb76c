"""Where the GPU's time goes in a step: kernels by kind, and the gaps between them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_kit.ceilings import wait

# Parts of kernel names, in the order in which they are looked for.
KINDS = {
    "attention": ("flash", "fmha", "varlen", "attention", "sdpa"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "tem_fused_mm",
               "aten::mm", "aten::addmm", "aten::bmm"),
    "copies": ("memcpy", "memset", "aten::copy_"),
}  # fmt: skip
# What is drawn on the device's time line over the kernels that it stands for.
ANNOTATIONS = ("## ", "Optimizer.", "ProfilerStep")
REST = "memory-bound (norms, activations, optimiser, cross-entropy)"


def kind_of(name: str) -> str:
    """Name the kind of a kernel."""
    low = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(p in low for p in parts)), REST)


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Add up the time in which any of some spans runs.

    >>> busy_us([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def profiled(steps: Any, device: str, *, n_steps: int) -> dict[str, Any]:
    """Profile some calls of ``steps``; on a CPU the operators stand in for kernels."""
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
    """Give the time of a kernel, or of an operator without those that it calls."""
    span = event.time_range
    return float(span.end - span.start if cuda else event.self_cpu_time_total)


def summary(spans: list[tuple[str, float, float, float]], *, n_steps: int) -> dict[str, Any]:
    """Sum up kernels (name, start, end, microseconds) by kind; shares are of the whole span."""
    if not spans:
        return {"failed": "the profiler saw no kernel"}
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    for name, _, _, taken in spans:
        by_kind[kind_of(name)] += taken
        by_name[name] += taken
    whole = max(end for _, _, end, _ in spans) - min(start for _, start, _, _ in spans)
    gaps = whole - busy_us((start, end) for _, start, end, _ in spans)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    return {
        "span_s_per_step": whole / n_steps / 1e6,
        "share": {kind: taken / whole for kind, taken in sorted(by_kind.items())},
        "gap_share": gaps / whole,
        "n_kernels_per_step": len(spans) / n_steps,
        "longest": {name[:90]: taken / whole for name, taken in longest},
    }
