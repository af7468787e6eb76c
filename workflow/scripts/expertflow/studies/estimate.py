"""Ratios of timings with 95 % intervals from paired runs. Pure.

Ratios of 2 and 1/2 are equally far from 1, so means and intervals are those of logarithms, with
Student's t on one degree of freedom less than pairs.
"""

import math
from collections.abc import Sequence

import numpy as np

from expertflow.studies.records import Estimate

# Quantile of a two-sided 95 % interval.
TAIL = 0.975
IS_ONE = Estimate(value=1.0, low=1.0, high=1.0, least=1.0, most=1.0)


def estimate(ratios: Sequence[float]) -> Estimate:
    """Return the geometric mean of ratios, its interval, and the extremes."""
    if len(ratios) < 2:
        raise ValueError(f"{len(ratios)} ratios have no spread")
    logs = np.log(np.asarray(ratios, np.float64))
    mean = float(logs.mean())
    half = t_quantile(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Estimate(
        value=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        least=float(min(ratios)),
        most=float(max(ratios)),
    )


def quotient(of: Estimate, to: Estimate) -> Estimate:
    """Divide two independently measured ratios to the same thing.

    Half-widths of logarithms add in squares, each with the quantile of its own few degrees of
    freedom, so the interval is rather too wide. Extremes are those of any two repeats.
    """
    value = of.value / to.value
    half = math.hypot(math.log(of.high / of.value), math.log(to.high / to.value))
    return Estimate(
        value=value,
        low=value * math.exp(-half),
        high=value * math.exp(half),
        least=of.least / to.most,
        most=of.most / to.least,
    )


def t_quantile(n_degrees: int, probability: float = TAIL) -> float:
    """Return the quantile of Student's t for an integer number of degrees of freedom.

    >>> round(t_quantile(2), 3)
    4.303
    """
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, n_degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, n: int) -> float:
    """Return the probability of at most ``t``, by the finite sums for integer degrees of freedom.

    odd   (2/pi) (angle + sin cos (1 + 2/3 cos^2 + 2*4/(3*5) cos^4 ...))
    even  sin (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 ...)
    """
    angle, odd = math.atan(t / math.sqrt(n)), n % 2
    total, term = 0.0, 1.0
    for k in range(n // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    both = math.sin(angle) * total
    if odd:
        both = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return (1 + both) / 2
