"""Forecast the hours of a training on a CPU, from the measured speed of one large product."""

import math

from expertflow.hardware import probe
from expertflow.plan.flops import count_weights, flops_per_token
from expertflow.plan.step_time import StepWork

# The share of one large product's speed that training on a CPU reaches, by parameters: lowest and
# highest. Seen on two shared cores, with Qwen3's layers: 0.06 to 0.33 at half a million (the
# demos), 0.3 to 0.8 at a hundred million.
CPU_SHARE = {5e5: (0.05, 0.4), 1e8: (0.3, 0.8)}
# What it takes besides its steps, mostly to import torch.
CPU_START_S = (3.0, 20.0)

Range = tuple[float, float]
# A training's tokens and one of its steps, at the least and at the most.
Runs = tuple[tuple[float, StepWork], tuple[float, StepWork]]


def cpu_hours(runs: Runs) -> Range:
    low, high = _cpu_share(count_weights(runs[0][1].facts))
    least, most = (
        n_tokens
        * flops_per_token(
            work.facts,
            lora=work.lora,
            mean_context_tokens=work.mean_context_tokens,
            supervised_fraction=work.supervised_fraction,
            checkpoint_activations=work.checkpoint,
        ).hardware
        for n_tokens, work in runs
    )
    speed, (soonest_s, latest_s) = probe.cpu_flops_per_s(), CPU_START_S
    return (least / speed / high + soonest_s) / 3600, (most / speed / low + latest_s) / 3600


def _cpu_share(n_weights: int) -> Range:
    """Interpolate between the two measured sizes, by the logarithm of the size.

    >>> _cpu_share(1000), _cpu_share(10**9)
    ((0.05, 0.4), (0.3, 0.8))
    """
    (small, of_small), (large, of_large) = CPU_SHARE.items()
    place = min(1.0, max(0.0, math.log(n_weights / small) / math.log(large / small)))
    low, high = (a + place * (b - a) for a, b in zip(of_small, of_large, strict=True))
    return low, high
