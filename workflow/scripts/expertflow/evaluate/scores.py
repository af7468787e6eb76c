"""Turn verdicts into a task's score. Pure."""

from collections import Counter
from collections.abc import Sequence
from math import sqrt

from expertflow.evaluate.records import TaskScore, Verdict

# The normal distribution's 97.5 % quantile: 2.5 % left out on either side.
Z_95 = 1.959963984540054


def wilson_interval(n_correct: int, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion, as fractions.

    Unlike the textbook interval it stays inside 0-1 and keeps a width at 0 and n correct, which
    small held-out sets reach: 0 of 10 is (0, 0.28), not (0, 0). Wilson, JASA 22 (1927) 209-212.
    """
    if not 0 <= n_correct <= n or n == 0:
        raise ValueError(f"no proportion: {n_correct} correct of {n}")
    p = n_correct / n
    scale = 1 + Z_95**2 / n
    centre = (p + Z_95**2 / (2 * n)) / scale
    half_width = Z_95 / scale * sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
    # The ends are exactly 0 and 1 in these two cases; rounding would leave 1e-17 beside them.
    low = 0.0 if n_correct == 0 else centre - half_width
    high = 1.0 if n_correct == n else centre + half_width
    return low, high


def summarise(metric: str, verdicts: Sequence[Verdict]) -> TaskScore:
    """Count verdicts; without examples there is no value, and the score says why."""
    n, n_correct = len(verdicts), sum(verdict.correct for verdict in verdicts)
    counts = Counter(verdict.kind for verdict in verdicts)
    return TaskScore(
        metric=metric,
        n_examples=n,
        n_correct=n_correct,
        value_fraction=n_correct / n if n else None,
        ci95=wilson_interval(n_correct, n) if n else None,
        n_by_kind=dict(sorted(counts.items())),
        reason=None if n else "no held-out examples to score",
    )
