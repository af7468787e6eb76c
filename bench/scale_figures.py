"""A number with its unit and where it comes from, and curves through measured points.

A figure is measured (its source says when and on what), taken from a table or a document of the
project, or assumed; an unknown one has no value and a reason. What is computed from an unknown
figure is unknown as well.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its unit and source; ``low`` and ``high`` are the spread of the repeats."""

    value: float | None
    unit: str
    source: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], unit: str, source: str) -> Self:
        """Take the median of repeats, and their range."""
        return cls(statistics.median(values), unit, source, min(values), max(values))

    @classmethod
    def unknown(cls, reason: str) -> Self:
        """Give no value, and say why."""
        return cls(None, "", f"unknown: {reason}")

    @classmethod
    def assumed(cls, value: float, unit: str, why: str) -> Self:
        """Give a value that nobody measured, and say so."""
        return cls(value, unit, f"assumed: {why}")

    def words(self) -> str:
        """Say all of it in one line."""
        if self.value is None:
            return self.source
        spread = "" if self.low is None else f" ({self.low:.4g} to {self.high:.4g})"
        return f"{self.value:.4g}{spread} {self.unit}; {self.source}"


@dataclass(frozen=True, slots=True)
class Line:
    """``at(x) = start + slope x``, from the points between ``low`` and ``high``."""

    start: float
    slope: float
    low: float
    high: float

    def at(self, x: float) -> float:
        """Give the value at ``x``."""
        return self.start + self.slope * x

    def reaches(self, y: float) -> float | None:
        """Give the ``x`` at which the line is at ``y``; null where it never is."""
        return (y - self.start) / self.slope if self.slope > 0 else None


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Lay a line through points by least squares.

    >>> fit_line([(1, 5), (2, 7), (3, 9)])
    Line(start=3.0, slope=2.0, low=1.0, high=3.0)
    """
    x, y = np.array(points, float).T
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return Line(float(y.mean() - slope * x.mean()), slope, float(x.min()), float(x.max()))


def fit_exponent(points: Sequence[tuple[float, float]]) -> float:
    """Give the p of the power law y = c x^p that is nearest to the points, in logarithms.

    >>> round(fit_exponent([(1, 3), (10, 300), (100, 30000)]), 6)
    2.0
    """
    return fit_line([(math.log(x), math.log(y)) for x, y in points]).slope


def fit_shares(points: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Give what each quantity costs, none below 0: y is the sum of costs times quantities.

    Points count by their relative error, so that large ones do not decide alone.
    """
    quantities = np.array([x for x, _ in points], float)
    results = np.array([y for _, y in points], float)
    costs, *_ = np.linalg.lstsq(quantities / results[:, None], np.ones(len(results)), rcond=None)
    if (costs >= 0).all():
        return [float(cost) for cost in costs]
    # With two quantities, one of which costs nothing, the other one takes it all.
    kept = int(np.argmax(costs))
    shares = quantities[:, kept] / results
    alone = float(shares.sum() / (shares**2).sum())
    return [alone if place == kept else 0.0 for place in range(quantities.shape[1])]


def crossing(
    curve: Callable[[float], float | None], limit: float, *, low: float = 1.0, high: float = 1e18
) -> float | None:
    """Give where a rising curve first reaches a limit, within a thousandth.

    Null where it does not up to ``high``, or where it is not known; ``low`` where it is there from
    the start.
    """
    first, last = curve(low), curve(high)
    if first is None or last is None or last < limit:
        return None
    if first >= limit:
        return low
    while high / low > 1.001:
        between = math.sqrt(low * high)
        value = curve(between)
        assert value is not None
        low, high = (low, between) if value >= limit else (between, high)
    return high
