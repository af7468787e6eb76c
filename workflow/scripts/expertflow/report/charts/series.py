"""Thin long series out for drawing: a few hundred bins, with the spread inside each.

Points are a table of x, y, low and high, ordered by x.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import asdict

from expertflow.report.records import Interval
from expertflow.train.records import EvalPoint, StepRecord

N_BINS = 180


def make_table(cls: type[Struct], records: Sequence[Struct]) -> pd.DataFrame:
    """Return records as a table with a column for each field."""
    # Columns are named, so that a table of no records still has them.
    rows = [asdict(record) for record in records]
    return pd.DataFrame.from_records(rows, columns=cls.__struct_fields__)


def envelope(x: pd.Series, y: pd.Series, n_bins: int = N_BINS) -> pd.DataFrame:
    """Reduce a series, ordered by x, to ``n_bins`` points of equal counts; nulls are left out."""
    points = pd.DataFrame({"x": x, "y": y, "low": y, "high": y}, dtype=float).dropna()
    return join_points(points, n_bins)


def join_points(points: pd.DataFrame, n_bins: int) -> pd.DataFrame:
    how = {"x": "mean", "y": "mean", "low": "min", "high": "max"}
    return points.groupby(_bins(points, n_bins)).agg(how)


def tokens_per_s(steps: pd.DataFrame) -> pd.DataFrame:
    # Tokens of a bin over its seconds: a mean of speeds would underweight slow steps.
    parts = steps.assign(took_s=durations_s(steps)).groupby(_bins(steps, N_BINS))
    seconds, clock = parts["took_s"].sum(), parts["elapsed_s"]
    points = pd.DataFrame({"x": (clock.first() + clock.last()) / 2})
    points["y"] = points["low"] = points["high"] = parts["n_tokens"].sum() / seconds
    # A bin that took no measurable time has no speed.
    return points[seconds > 0]


def durations_s(steps: pd.DataFrame) -> pd.Series:
    """Return the time from the end of one step to the end of the next, pauses included.

    If the step before is not on record (the first one, or a run that keeps one line per log
    interval), or a resumed run set its clock back, the step's own time is all that is known.
    """
    gap_s = steps["elapsed_s"].diff()
    return gap_s.where((steps["step"].diff() == 1) & (gap_s > 0), steps["step_s"])


def evaluation_spans(steps: Sequence[StepRecord], points: Sequence[EvalPoint]) -> list[Interval]:
    end_s = {step.step: step.elapsed_s for step in steps}
    if steps and steps[0].step == 1:
        before_s = sum(point.eval_s for point in points if point.step == 0)
        # The evaluation before training ends where the first step begins.
        end_s[0] = steps[0].elapsed_s - steps[0].step_s - before_s
    return [
        (end_s[point.step], end_s[point.step] + point.eval_s)
        for point in points
        if point.step in end_s
    ]


def _bins(table: pd.DataFrame, n_bins: int) -> np.ndarray:
    """Return the number of each row's bin."""
    # 7 rows, 3 bins -> 3 rows each: 0 0 0 1 1 1 2
    return np.arange(len(table)) // max(1, -(-len(table) // max(1, n_bins)))
