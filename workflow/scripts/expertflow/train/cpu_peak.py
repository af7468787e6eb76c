"""Measure how fast this CPU multiplies matrices: no source gives a peak for it."""

import time

import torch

WIDTH = 1024  # large enough for all cores, 20 ms on two of them
MEASURED_S = 0.3


def measure_cpu_flops_per_s(dtype: torch.dtype, n_threads: int | None) -> float:
    """Return the FLOP/s of the fastest product of two square matrices, with the run's threads.

    The fastest, as whatever else runs here can only slow a product down.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads or before)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn((WIDTH, WIDTH), generator=generator).to(dtype) for _ in range(2))
    out, best_s = torch.mm(left, right), float("inf")
    end_s = time.perf_counter() + MEASURED_S
    while (start_s := time.perf_counter()) < end_s:
        torch.mm(left, right, out=out)
        best_s = min(best_s, time.perf_counter() - start_s)
    torch.set_num_threads(before)
    return 2 * WIDTH**3 / best_s
