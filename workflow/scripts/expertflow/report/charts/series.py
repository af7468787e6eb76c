"""Thin long series out for drawing: a few hundred bins, with the spread inside each."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from expertflow.core.records import Record
from expertflow.train.records import EvalPoint, StepRecord

T = TypeVar("T")

N_BINS = 180


class Point(Record, frozen=True, kw_only=True):
    x: float
    y: float
    low: float
    high: float


Interval = tuple[float, float]  # start and end


def envelope(values: Iterable[tuple[float, float | None]], n_bins: int = N_BINS) -> list[Point]:
    """Reduce (x, y) pairs, ordered by x, to ``n_bins`` bins of equal counts; nulls are left out."""
    known = [Point(x=x, y=y, low=y, high=y) for x, y in values if y is not None]
    return join_points(known, n_bins)


def join_points(points: Sequence[Point], n_bins: int) -> list[Point]:
    return [
        Point(
            x=fmean(point.x for point in part),
            y=fmean(point.y for point in part),
            low=min(point.low for point in part),
            high=max(point.high for point in part),
        )
        for part in _parts(points, n_bins)
    ]


def tokens_per_s(steps: Sequence[StepRecord]) -> list[Point]:
    points = []
    for part in _parts(list(zip(steps, durations_s(steps), strict=True)), N_BINS):
        seconds = sum(took_s for _, took_s in part)
        if seconds > 0:
            rate = sum(step.n_tokens for step, _ in part) / seconds
            middle_s = (part[0][0].elapsed_s + part[-1][0].elapsed_s) / 2
            points.append(Point(x=middle_s, y=rate, low=rate, high=rate))
    return points


def durations_s(steps: Sequence[StepRecord]) -> list[float]:
    """Return the time from the end of one step to the end of the next, pauses included.

    Where the step before is not on record (the first one, or a run that keeps one line per log
    interval), or where a resumed run set its clock back, the step's own time is all that is known.
    """
    result = [step.step_s for step in steps[:1]]
    for before, step in pairwise(steps):
        gap_s = step.elapsed_s - before.elapsed_s
        follows = step.step == before.step + 1 and gap_s > 0
        result.append(gap_s if follows else step.step_s)
    return result


def evaluation_spans(steps: Sequence[StepRecord], points: Sequence[EvalPoint]) -> list[Interval]:
    end_s = {step.step: step.elapsed_s for step in steps}
    if steps and steps[0].step == 1:
        before_s = sum(point.eval_s for point in points if point.step == 0)
        end_s[0] = steps[0].elapsed_s - steps[0].step_s - before_s
    return [
        (end_s[point.step], end_s[point.step] + point.eval_s)
        for point in points
        if point.step in end_s
    ]


def _parts(items: Sequence[T], n_parts: int) -> list[Sequence[T]]:
    size = max(1, -(-len(items) // max(1, n_parts)))
    return [items[start : start + size] for start in range(0, len(items), size)]
