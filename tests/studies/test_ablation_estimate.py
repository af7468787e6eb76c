"""Intervals of ratios: by the books, and the same whichever way round."""

import math

import numpy as np
import pytest

from expertflow.studies.estimate import IS_ONE, estimate, quotient, t_quantile


@pytest.mark.parametrize(
    ("n", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (10, 2.2281), (49, 2.0096)],
)
def test_quantiles_are_those_of_the_tables(n: int, value: float) -> None:
    assert t_quantile(n) == pytest.approx(value, abs=1e-4)


def test_an_interval_is_that_of_the_logarithms() -> None:
    # Logarithms -0.1, 0, 0.1: mean 0, deviation 0.1, half-width 4.3027 * 0.1 / sqrt(3).
    found = estimate([math.exp(-0.1), 1.0, math.exp(0.1)])
    assert found.value == pytest.approx(1)
    assert math.log(found.high) == pytest.approx(4.3027 * 0.1 / math.sqrt(3), abs=1e-5)
    assert found.low == pytest.approx(1 / found.high)
    assert (found.least, found.most) == (math.exp(-0.1), math.exp(0.1))


def test_a_single_ratio_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 ratios"):
        estimate([2.0])


def test_quotients_add_half_widths_in_squares() -> None:
    of, to = estimate([1.9, 2.0, 2.1]), estimate([0.5, 0.52, 0.48])
    found = quotient(of, to)
    assert found.value == pytest.approx(of.value / to.value)
    squares = [math.log(e.high / e.value) ** 2 for e in (of, to)]
    assert math.log(found.high / found.value) ** 2 == pytest.approx(sum(squares))
    assert found.least == pytest.approx(1.9 / 0.52) and found.most == pytest.approx(2.1 / 0.48)
    assert quotient(of, IS_ONE).low == pytest.approx(of.low)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    found = [estimate(np.exp(rng.normal(0.3, 0.1, 3)).tolist()) for _ in range(2000)]
    held = np.mean([e.low <= math.exp(0.3) <= e.high for e in found])
    assert held == pytest.approx(0.95, abs=0.015)
