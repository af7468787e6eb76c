"""The card's limits: matrix products and copies, measured with nothing else running."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

from gpu_kit.fixtures import SIZES
from gpu_kit.training import Work

MEASURED_S = 1.0


def measure_ceilings(work: Work) -> dict[str, Any]:
    """Measure products (a large cube and the model's own) and copies; null if there are none.

    The products as (m, k, n) are those of one layer and the head over a micro-batch.
    """
    device, gpu, size = work.device, work.gpu(), SIZES[work.model]
    cuda, tokens, facts = device == "cuda", 16 * size.row_length, size.facts
    side, n_bytes = (8192, 1 << 30) if cuda else (256, 1 << 24)
    products = {
        f"{side} cube": product(device, side, side, side),
        "q_proj": product(device, tokens, facts.hidden_size, facts.n_heads * facts.head_dim),
        "up_proj": product(device, tokens, facts.hidden_size, facts.intermediate_size),
        "down_proj": product(device, tokens, facts.intermediate_size, facts.hidden_size),
        # The head sees supervised rows only, a few hundred at a time.
        "head, 256 rows": product(device, 256, facts.hidden_size, facts.vocab_size),
    }
    return {
        "matmul_flops_per_s": products[f"{side} cube"],
        "matmul_by_shape": products,
        "matmul_dtype": "bf16" if cuda else "fp32",
        "copy_bytes_per_s": {
            # Reads and writes every byte.
            "on the device": 2 * n_bytes / copying_s(n_bytes, device, device),
            "host to device": n_bytes / copying_s(n_bytes, "cpu", device) if cuda else None,
            "device to host": n_bytes / copying_s(n_bytes, device, "cpu") if cuda else None,
        },
        "peak_bf16_flops_per_s": gpu.peak_bf16_flops_per_s if gpu else None,
        "peak_bandwidth_bytes_per_s": gpu.peak_bandwidth_bytes_per_s if gpu else None,
        "peak_source": gpu.source if gpu else "the peak of a CPU is not known",
    }


def product(device: str, m: int, k: int, n: int) -> float:
    """Return the FLOP/s of a product of random matrices: zeros would draw less power."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2 * m * k * n / seconds(lambda: torch.matmul(a, b.T, out=out))


def copying_s(n_bytes: int, source: str, target: str) -> float:
    """Return the seconds per copy; host memory is pinned for a card."""
    old, new = (
        torch.zeros(
            n_bytes, dtype=torch.uint8, device=side, pin_memory=(side, other) == ("cpu", "cuda")
        )
        for side, other in ((source, target), (target, source))
    )
    return seconds(lambda: new.copy_(old, non_blocking=True))


def seconds(work: Callable[[], Any]) -> float:
    """Return the median seconds per call, over bursts that end with an idle device."""
    return Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=MEASURED_S).median
