"""The score of a task: counts, and an interval that behaves at the edges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.evaluate.records import Verdict
from expertflow.evaluate.statistics import summarise, wilson_interval


def _verdicts(*kinds: str) -> list[Verdict]:
    return [Verdict(correct=kind == "correct", kind=kind) for kind in kinds]


@pytest.mark.parametrize(
    ("n_correct", "n", "low", "high"),
    # Worked by hand from the formula, to four digits; the first is the textbook's example.
    [
        (81, 263, 0.2553, 0.3662),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
    ],
)
def test_wilson_interval_matches_known_values(
    n_correct: int, n: int, low: float, high: float
) -> None:
    assert wilson_interval(n_correct, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_fraction_and_stays_inside(case: tuple[int, int]) -> None:
    n_correct, n = case
    low, high = wilson_interval(n_correct, n)
    assert 0 <= low <= n_correct / n <= high <= 1
    assert low < high
    mirrored = wilson_interval(n - n_correct, n)
    assert mirrored == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("n_correct", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_refuses_what_is_no_proportion(n_correct: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(n_correct, n)


def test_summarise_counts_by_kind() -> None:
    score = summarise("execution_accuracy", _verdicts("wrong_rows", "correct", "empty", "correct"))
    assert (score.metric, score.n_examples, score.n_correct) == ("execution_accuracy", 4, 2)
    assert score.value_fraction == 0.5
    assert score.ci95 == wilson_interval(2, 4)
    assert list(score.n_by_kind.items()) == [("correct", 2), ("empty", 1), ("wrong_rows", 1)]
    assert score.reason is None


def test_summarise_of_nothing_is_unknown_and_says_why() -> None:
    score = summarise("exact_match", [])
    assert (score.value_fraction, score.ci95, score.n_by_kind) == (None, None, {})
    assert score.reason
