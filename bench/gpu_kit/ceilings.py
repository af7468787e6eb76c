"""The card's limits: matrix products and copies, measured with nothing else running."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from expertflow.plan.records import ModelFacts
from gpu_kit.marks import wait

REPEATS = 7
BURST_S = 0.15


def ceilings(facts: ModelFacts, device: str, *, tokens: int) -> dict[str, Any]:
    """Measure products (a large cube and the model's own) and copies; null if there are none."""
    cuda = device == "cuda"
    side = 8192 if cuda else 256
    shapes = {f"{side} cube": (side, side, side), **model_shapes(facts, tokens)}
    products = {name: product(device, *shape) for name, shape in shapes.items()}
    n_bytes = (1 << 30) if cuda else (1 << 24)
    # A copy reads and writes every byte.
    copied = 2 * n_bytes / copying_s(n_bytes, device, device)
    return {
        "matmul_flops_per_s": products[f"{side} cube"],
        "matmul_by_shape": products,
        "matmul_dtype": "bf16" if cuda else "fp32",
        "device_copy_bytes_per_s": copied,
        "host_to_device_bytes_per_s": n_bytes / copying_s(n_bytes, "cpu", device) if cuda else None,
        "device_to_host_bytes_per_s": n_bytes / copying_s(n_bytes, device, "cpu") if cuda else None,
    }


def model_shapes(facts: ModelFacts, tokens: int) -> dict[str, tuple[int, int, int]]:
    """Return the products of one layer and the head over a micro-batch, as (m, k, n)."""
    h, q = facts.hidden_size, facts.n_heads * facts.head_dim
    return {
        "q_proj": (tokens, h, q),
        "up_proj": (tokens, h, facts.intermediate_size),
        "down_proj": (tokens, facts.intermediate_size, h),
        # The head sees supervised rows only, a few hundred at a time.
        "head, 256 rows": (256, h, facts.vocab_size),
    }


def product(device: str, m: int, k: int, n: int) -> float:
    """Return the FLOP/s of a product of random matrices: zeros would draw less power."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2 * m * k * n / seconds(lambda: torch.matmul(a, b.T, out=out), device)


def copying_s(n_bytes: int, source: str, target: str) -> float:
    """Return the seconds per copy; host memory is pinned."""
    sides = [
        torch.zeros(n_bytes, dtype=torch.uint8, device=side, pin_memory=pinned)
        for side, pinned in ((source, source != target and source == "cpu"),
                             (target, source != target and target == "cpu"))
    ]  # fmt: skip
    device = "cuda" if "cuda" in (source, target) else "cpu"
    return seconds(lambda: sides[1].copy_(sides[0], non_blocking=True), device)


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return the median seconds per call, over bursts that are long enough to time."""
    for _ in range(3):
        work()
    n, taken = 1, _burst_s(work, 1, device)
    while taken < BURST_S / 4:
        n *= 4
        taken = _burst_s(work, n, device)
    return statistics.median(_burst_s(work, n, device) / n for _ in range(REPEATS))


def _burst_s(work: Callable[[], Any], n: int, device: str) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(n):
        work()
    wait(device)
    return time.perf_counter() - start
