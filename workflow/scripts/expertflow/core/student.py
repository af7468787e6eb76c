"""Quantiles of Student's distribution, for intervals of few measurements, without scipy."""

import math
from functools import cache


@cache
def student_quantile(n_degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t for an integer number of degrees of freedom.

    >>> round(student_quantile(2), 3)
    4.303
    """
    low, high = 0.0, 13.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _cdf(middle, n_degrees) < 0.975 else (low, middle)
    return (low + high) / 2


def _cdf(t: float, n: int) -> float:
    """Return the probability of at most ``t``, by the finite sums for integer degrees of freedom.

    odd   (2/pi) (angle + sin cos (1 + 2/3 cos^2 + 2*4/(3*5) cos^4 ...))
    even  sin (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 ...)
    """
    angle, odd = math.atan(t / math.sqrt(n)), n % 2  # t = sqrt(n) tan(angle)
    total, term, cos2 = 0.0, 1.0, math.cos(angle) ** 2
    for k in range(n // 2):
        total += term
        term *= cos2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    both = math.sin(angle) * total
    if odd:
        both = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return (1 + both) / 2
