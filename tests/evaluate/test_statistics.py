"""Intervals cover the truth as often as claimed, and chance is not taken for a change."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from expertflow.evaluate import statistics
from expertflow.evaluate.records import Judgment, TaskScore

N_SIMULATIONS = 400


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resample a tenth as often; only the last digits of an interval change."""
    monkeypatch.setattr(statistics, "N_RESAMPLES", 1000)


def test_a_lower_loss_is_better_and_documents_count_by_their_targets() -> None:
    rng = np.random.default_rng(0)
    n_targets = rng.integers(1, 50, 80)
    before = rng.gamma(2.0, 1.0, 80)
    after = before - 0.3 - 0.1 * rng.random(80)
    found = statistics.estimate_change(
        "loss", before, after, weights=n_targets, higher_is_better=False, seed=0
    )  # fmt: skip
    assert found.change == "better"
    assert found.difference == pytest.approx(np.average(after - before, weights=n_targets))
    back = statistics.estimate_change("m", before, after, higher_is_better=True, seed=0)
    assert (back.quantity, back.n, back.change) == ("m", 80, "worse")


def test_a_handful_of_questions_proves_nothing() -> None:
    """All wrong answers became right: by a sign test 2 x 0.5^5 = 0.06 for five."""
    for n, change in ((0, "no measurable change"), (5, "no measurable change"), (6, "better")):
        before, after = [0] * n + [1] * 4, [1] * (n + 4)
        found = statistics.estimate_change("m", before, after, higher_is_better=True, seed=0)
        assert found.change == change
    # One of six has no weight.
    weights = [0] + [1] * 9
    found = statistics.estimate_change(
        "m", before, after, weights=weights, higher_is_better=True, seed=0
    )
    assert found.change == "no measurable change"


def test_groups_are_resampled_together(few_resamples: None) -> None:
    """Each of 200 questions occurs five times: the copies add no information."""
    rng = np.random.default_rng(0)
    before, after = rng.random(200) < 0.4, rng.random(200) < 0.5

    def interval(n_copies: int, **groups: Any) -> tuple[float, float]:
        sides = (np.repeat(side, n_copies) for side in (before, after))
        change = statistics.estimate_change("m", *sides, higher_is_better=True, seed=0, **groups)
        assert change.n == 200 * n_copies
        return change.ci95

    one, (low, high) = interval(1), interval(5)
    assert high - low == pytest.approx((one[1] - one[0]) / 5**0.5, rel=0.1)
    assert interval(5, groups=np.repeat(np.arange(200), 5).tolist()) == pytest.approx(one)
    assert interval(1, groups=[str(i) for i in range(200)]) == one
    with pytest.raises(ValueError, match="length"):
        interval(5, groups=range(200))
    few = statistics.estimate_change(
        "m", [0] * 60, [1] * 60, groups=[i % 5 for i in range(60)], higher_is_better=True, seed=0
    )
    assert few.change == "no measurable change"


def test_a_loss_counts_each_group_once(few_resamples: None) -> None:
    rng = np.random.default_rng(0)
    nats, counts = rng.exponential(9, 50), rng.integers(1, 9, 50)
    one = statistics.mean_interval(nats, counts, seed=0)
    groups = np.repeat(np.arange(50), 4).tolist()
    assert one == statistics.mean_interval(nats, counts, seed=0, groups=range(50))
    repeated = (np.repeat(each, 4) for each in (nats, counts))
    assert statistics.mean_interval(*repeated, seed=0, groups=groups) == pytest.approx(one)
    assert statistics.mean_interval(nats, counts, seed=0, groups=[i % 5 for i in range(50)]) is None


def test_the_interval_of_fair_coins_is_binomial() -> None:
    """Of 20 tosses 0.6 % have at most 4 heads, and 2.1 % at most 5; 1.6 % are cut off."""
    sums, counts = [1] * 10 + [0] * 10, [1] * 20
    assert statistics.mean_interval(sums, counts, seed=0) == (0.25, 0.75)
    # Long documents count more: 180 nats of 200 targets.
    low, high = statistics.mean_interval([9, 0] * 20, [9, 1] * 20, seed=0) or (0, 0)
    assert low < 0.9 < high


# Quantiles are qt(0.975, n - 1) of R.
@pytest.mark.parametrize(
    ("n", "quantile"),
    [(2, 12.706204736174694), (6, 2.570581835636314), (201, 1.971896223633841)],
)
def test_few_units_cut_off_less(n: int, quantile: float) -> None:
    widened = NormalDist().cdf(-quantile * (n / (n - 1)) ** 0.5)
    assert statistics.tail_of_interval(n) == pytest.approx(widened, rel=1e-9)
    assert statistics.tail_of_interval(1) == 0.0


def test_an_interval_that_ends_at_zero_is_not_a_change() -> None:
    """Eight became wrong and two right, of forty."""
    one, other = [1] * 8 + [0] * 32, [0] * 8 + [1] * 2 + [0] * 30
    down = statistics.estimate_change("m", one, other, higher_is_better=True, seed=0)
    up = statistics.estimate_change("m", other, one, higher_is_better=True, seed=0)
    assert (down.ci95[1], up.ci95[0]) == (0, 0)
    assert down.change == up.change == "no measurable change"


def test_the_mean_of_few_documents_has_no_interval() -> None:
    # The means of five vary too little, and a document without targets is ignored.
    assert statistics.mean_interval([3.0, 1.0] * 3, [2, 1] * 3, seed=0) is not None
    assert statistics.mean_interval([3.0, 0.0] * 3, [2, 0] * 3, seed=0) is None
    assert statistics.mean_interval([3.0, 1.0, 2.0, 1.5, 0.5], [1] * 5, seed=0) is None


def test_wilson_interval_matches_known_values() -> None:
    """Calculated by hand from the formula, to four digits; the first is the textbook's example."""
    for n_correct, n, low, high in (
        (81, 263, 0.2553, 0.3662), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
    ):  # fmt: skip
        assert statistics.wilson_interval(n_correct, n) == pytest.approx((low, high), abs=5e-5)
    # By rounding alone neither would be exact.
    assert statistics.wilson_interval(0, 9)[0] == 0 and statistics.wilson_interval(10, 10)[1] == 1


def test_summarize_counts_by_kind() -> None:
    kinds = ("wrong_rows", "correct", "empty", "correct")
    score = statistics.summarize_judgments("execution_accuracy", [Judgment(kind) for kind in kinds])
    assert score == TaskScore(
        metric="execution_accuracy", n_examples=4, n_correct=2, value_fraction=0.5, reason=None,
        ci95=statistics.wilson_interval(2, 4),
        n_by_kind={"correct": 2, "empty": 1, "wrong_rows": 1},
    )  # fmt: skip
    assert list(score.n_by_kind) == sorted(kinds[:3])
    nothing = statistics.summarize_judgments("m", [], "not scored")
    assert (nothing.value_fraction, nothing.ci95, nothing.reason) == (None, None, "not scored")


def test_grouped_questions_count_as_fewer_independent_ones() -> None:
    def score(right: Sequence[bool], groups: Sequence[int] | None) -> tuple[float, float]:
        judgments = [Judgment("correct" if one else "wrong") for one in right]
        ci95 = statistics.summarize_judgments("m", judgments, groups=groups).ci95
        assert ci95 is not None
        return ci95

    # Each of 40 questions in five wordings that are right or wrong together: 200 say as much as 40,
    # and less so by Student's quantiles qt(0.975, 199) and qt(0.975, 39) of R.
    right = [i < 30 for i in range(40)]
    alone = statistics.wilson_interval(30, 40)
    n = 40 * (39 / 40) / (199 / 200) * (1.971957 / 2.022691) ** 2
    in_five = score(np.repeat(right, 5).tolist(), np.repeat(np.arange(40), 5).tolist())
    assert in_five == pytest.approx(statistics.wilson_interval(0.75 * n, n), abs=1e-5)
    assert score(right, list(range(40))) == score(right, None) == alone
    # Groups as mixed as all questions, or more so, change nothing but for their small number.
    mixed = score([True, False] * 100, np.repeat(np.arange(100), 2).tolist())
    assert mixed == pytest.approx(statistics.wilson_interval(100, 200), abs=0.001)
    # All right: how alike they are within a group is not known.
    all_right = score([True] * 60, np.repeat(np.arange(12), 5).tolist())
    assert all_right == pytest.approx(statistics.wilson_interval(10.2, 10.2), abs=0.02)
    assert score([True] * 9, [0] * 9) == statistics.wilson_interval(1, 1)
    # Two groups as mixed as all questions: only Student's quantiles shrink the number.
    n = statistics.count_independent([1, 1, 0, 1, 0, 0], list("aaabbb"))
    assert n == pytest.approx(6 * (2.570582 / 12.706205) ** 2, rel=1e-5)


def test_grouped_scores_hold_the_truth_as_often_as_they_say() -> None:
    rng, n_held, n_held_alone = np.random.default_rng(5), 0, 0
    for _ in range(400):
        # 20 groups of five with a chance of their own; 0.7 on average, alike to 0.5.
        groups = np.repeat(np.arange(20), 5)
        right = rng.random(100) < rng.beta(0.7, 0.3, 20)[groups]
        n = statistics.count_independent(right, groups.tolist())
        for n_alone in (n, 100):
            low, high = statistics.wilson_interval(right.mean() * n_alone, n_alone)
            n_held += low <= 0.7 <= high if n_alone == n else 0
            n_held_alone += low <= 0.7 <= high if n_alone == 100 else 0
    assert 0.92 < n_held / 400 < 0.98 and n_held_alone / 400 < 0.8


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("n", [50, 200])
def test_the_interval_of_a_metric_covers_the_truth(n: int) -> None:
    """Questions become right with 0.25 and wrong with 0.10, so the truth is 0.15."""
    rng = np.random.default_rng(n)
    n_held = n_better = 0
    for seed in range(N_SIMULATIONS):
        drawn = rng.random(n)
        before = (drawn < 0.10) | (drawn > 0.80)
        after = ((drawn >= 0.10) & (drawn < 0.35)) | (drawn > 0.80)
        found = statistics.estimate_change("m", before, after, higher_is_better=True, seed=seed)
        n_held += found.ci95[0] <= 0.15 <= found.ci95[1]
        n_better += found.change == "better"
    assert 0.92 <= n_held / N_SIMULATIONS <= 0.98
    # Power by a normal approximation: 15 points against standard errors of 8 and 4.
    assert n_better / N_SIMULATIONS > {50: 0.35, 200: 0.9}[n]


@pytest.mark.usefixtures("few_resamples")
def test_chance_is_rarely_taken_for_a_change() -> None:
    for n_differing in (0.02, 0.1, 0.5):
        rng = np.random.default_rng(7)
        n_wrong = 0
        for seed in range(N_SIMULATIONS):
            drawn = rng.random(200)
            before, after = drawn < n_differing / 2, drawn > 1 - n_differing / 2
            found = statistics.estimate_change("m", before, after, higher_is_better=True, seed=seed)
            n_wrong += found.change != "no measurable change"
        assert n_wrong / N_SIMULATIONS <= 0.075


@pytest.mark.usefixtures("few_resamples")
def test_blocks_of_documents_give_about_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 60, 2000)
    sums = rng.gamma(4.0, counts / 4)
    monkeypatch.setattr(statistics, "MAX_UNITS", 2000)
    whole = statistics.mean_interval(sums, counts, seed=0)
    monkeypatch.setattr(statistics, "MAX_UNITS", 500)
    blocks = statistics.mean_interval(sums, counts, seed=0)
    assert whole is not None and blocks is not None and whole != blocks
    assert blocks == pytest.approx(whole, abs=0.15 * (whole[1] - whole[0]))
