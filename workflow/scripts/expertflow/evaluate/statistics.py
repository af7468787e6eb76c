"""Turn judgments into scores, and estimate the uncertainty of differences. Pure and seeded."""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertflow.core.student import student_quantile
from expertflow.evaluate.records import Change, Judgment, PairedChange, TaskScore

Floats = NDArray[np.float64]

N_RESAMPLES = 10_000
# If there are more pairs, they are summed in this many random blocks: the interval's width is then
# known to about 1 / sqrt(2 x 1,000) = 2 %, and a GPU does not wait for a hundred million draws.
MAX_UNITS = 1_000
# The normal distribution's 97.5 % quantile: 2.5 % excluded on either side.
Z_95 = 1.959963984540054
# If five pairs differ, all in one direction, the p-value of a sign test is 2 x 0.5^5 = 0.06.
MIN_DIFFERING = 6
NO_EXAMPLES = "no held-out examples to score"


def estimate_change(
    quantity: str,
    before: ArrayLike,
    after: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    groups: Sequence[Hashable] | None = None,
    higher_is_better: bool,
    seed: int,
) -> PairedChange:
    """Compare paired measurements, at least one; positive means ``after`` is higher.

    The difference is that of the means, weighted by ``weights`` if given (a document's targets),
    with the interval of 10,000 resamples of the pairs, or of ``groups`` of pairs that are right or
    wrong together. It counts as a change if the interval excludes zero and at least
    six pairs, or groups, differ: fewer prove nothing.
    """
    differences = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    weights_N = np.ones(len(differences)) if weights is None else np.asarray(weights, np.float64)
    sums_N = differences * weights_N
    total = float(sums_N.sum() / weights_N.sum())
    if groups is not None:
        sums_N, weights_N = (_sum_by_group(each, groups) for each in (sums_N, weights_N))
    low, high = _interval(sums_N, weights_N, seed)
    change: Change = "no measurable change"
    # A group whose differences cancel out does not count as differing.
    enough_differ = np.count_nonzero(sums_N) >= MIN_DIFFERING
    if enough_differ and not low <= 0 <= high:
        change = "better" if (low > 0) == higher_is_better else "worse"
    return PairedChange(
        quantity=quantity, difference=total, ci95=(low, high), n=len(differences), change=change
    )


def _sum_by_group(values_N: Floats, groups: Sequence[Hashable]) -> Floats:
    """Sum values [N] by group [G], in the order in which the groups occur first."""
    places: dict[Hashable, int] = {}
    at = [places.setdefault(group, len(places)) for group in groups]
    return np.bincount(at, values_N).astype(np.float64)


def mean_interval(
    sums: ArrayLike, counts: ArrayLike, seed: int, groups: Sequence[Hashable] | None = None
) -> tuple[float, float] | None:
    """Bootstrap the 95 % interval of sum over count by document or group; null below six."""
    sums_N, counts_N = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if groups is not None:
        sums_N, counts_N = (_sum_by_group(each, groups) for each in (sums_N, counts_N))
    is_counted = counts_N > 0
    if is_counted.sum() < MIN_DIFFERING:
        return None
    return _interval(sums_N[is_counted], counts_N[is_counted], seed)


def _interval(sums_N: Floats, counts_N: Floats, seed: int) -> tuple[float, float]:
    """Return a 95 % interval of the ratio of sums over resampled (sum, count) pairs.

    Equal pairs are drawn together, so a metric of right and wrong needs only a few numbers per
    resample, whatever the number of questions.
    """
    rng = np.random.default_rng(seed)
    units = np.stack((sums_N, counts_N), axis=1)  # [N, 2]
    kinds_K2, n_K = np.unique(units, axis=0, return_counts=True)  # K = 3 for right and wrong
    if len(kinds_K2) > MAX_UNITS:
        blocks = np.array_split(rng.permutation(len(units)), MAX_UNITS)
        kinds_K2 = np.stack([units[block].sum(axis=0) for block in blocks])
        n_K = np.ones(MAX_UNITS, np.int64)
    n_units = int(n_K.sum())
    # Counts of each kind per resample, distributed as if n_units were drawn one by one.
    drawn_RK = rng.multinomial(n_units, n_K / n_units, size=N_RESAMPLES)
    # Elementwise, because a matmul may round differently on another machine.
    ratios_R = (drawn_RK * kinds_K2[:, 0]).sum(axis=1) / (drawn_RK * kinds_K2[:, 1]).sum(axis=1)
    tail = tail_of_interval(n_units)
    low, high = np.quantile(ratios_R, (tail, 1 - tail)).tolist()
    return low, high


def tail_of_interval(n: int) -> float:
    """Return the share of resamples of n units to exclude on either side of a 95 % interval.

    Resamples of few units vary too little: by the root of 1 - 1/n, and by as much as Student's
    distribution is wider than the normal one (Hesterberg, The American Statistician 69 (2015)
    371-386).
    """
    return NormalDist().cdf(-student_quantile(n - 1) * sqrt(n / (n - 1))) if n > 1 else 0.0


def wilson_interval(n_correct: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion (JASA 22 (1927) 209-212).

    Unlike the textbook interval, it has a width even at 0 and n correct, which small held-out sets
    reach: 0 of 10 is (0, 0.28), not (0, 0).
    """
    p = n_correct / n
    scale = 1 + Z_95**2 / n
    center = (p + Z_95**2 / (2 * n)) / scale
    half_width = Z_95 / scale * sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
    # Exactly 0 and 1 in these two cases, where rounding would leave 1e-17.
    low = 0.0 if n_correct == 0 else center - half_width
    high = 1.0 if n_correct == n else center + half_width
    return low, high


def count_independent(right: ArrayLike, groups: Sequence[Hashable]) -> float:
    """Return the effective sample size of a share of right answers in ``groups`` of questions.

    That is the number of independent questions that would determine the share as precisely (Korn
    and Graubard, Survey Methodology 24 (1998) 193-201): the number of questions over the ratio of
    the share's variance between groups to that between questions, with Student's quantiles for
    few groups. It is the number of questions if each is its own group, and never more.
    """
    right_N, n_groups = np.asarray(right, np.float64), len(set(groups))
    n = len(right_N)
    if n_groups < 2 or n_groups == n:
        return n_groups
    rest_N = right_N - right_N.mean()
    # If all are right, or none, nothing shows how alike a group's questions are; assume entirely.
    if not rest_N.any():
        rest_N = np.ones(n)
    between = float((_sum_by_group(rest_N, groups) ** 2).sum()) / (n_groups - 1) * n_groups
    within = float((rest_N**2).sum()) / (n - 1) * n
    ratio = student_quantile(n - 1) / student_quantile(n_groups - 1)
    return n / max(1.0, between / within) * ratio**2


def summarize_judgments(
    metric: str,
    judgments: Sequence[Judgment],
    empty: str = NO_EXAMPLES,
    groups: Sequence[Hashable] | None = None,
) -> TaskScore:
    """Count right answers; ``groups`` of questions that are right together widen the interval."""
    right = [judgment.correct for judgment in judgments]
    n, n_correct = len(right), sum(right)
    counts = Counter(judgment.kind for judgment in judgments)
    # Scaling both counts keeps the share of right ones.
    scale = count_independent(right, groups) / n if n and groups is not None else 1
    return TaskScore(
        metric=metric,
        n_examples=n,
        n_correct=n_correct,
        value_fraction=n_correct / n if n else None,
        ci95=wilson_interval(scale * n_correct, scale * n) if n else None,
        n_by_kind=dict(sorted(counts.items())),
        reason=None if n else empty,
    )
