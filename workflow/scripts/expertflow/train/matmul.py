"""Measure what a device reaches on one large product, in place of a peak that no source gives."""

import statistics
import time
from collections.abc import Callable

import torch

# A cube of 8192 is large enough for any card of today; 1024 takes a CPU some milliseconds.
CUDA_WIDTH, CPU_WIDTH = 8192, 1024
N_WARMUP, N_TIMED = 5, 15


def measured_matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Time products of two square matrices and give the FLOP/s of the median one.

    The data is random: products of zeros draw less power, and so run at higher clocks.
    """
    width = CUDA_WIDTH if device.type == "cuda" else CPU_WIDTH
    generator = torch.Generator(device).manual_seed(0)
    shape = width, width
    left, right = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    out = torch.empty(shape, device=device, dtype=dtype)
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds
    seconds = timed(lambda: torch.mm(left, right, out=out))
    return 2 * width**3 / statistics.median(seconds)


def _cuda_seconds(run: Callable[[], object]) -> list[float]:
    """Time on the device itself; all is queued before the first is waited for."""
    for _ in range(N_WARMUP):
        run()
    pairs = []
    for _ in range(N_TIMED):
        start, end = _event(), _event()
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_seconds(run: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(N_WARMUP + N_TIMED):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return seconds[N_WARMUP:]
