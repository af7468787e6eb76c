"""Measure what steps alone do not show: what saves take of a run, and how fast rows are read."""

import math
from collections.abc import Sequence
from pathlib import Path

from expertflow.hardware.disk import file_read_speed
from expertflow.plan.records import TrainPlan
from expertflow.staging.records import Staged
from expertflow.studies.variants import NotMeasurableError
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.train.trial import TrialResult


def n_saves(plan: TrainPlan, steps_s: float) -> int:
    """Count the saves of a run whose steps take so long: by steps, or by time if that is more."""
    by_steps = math.ceil(plan.n_steps / plan.save_steps)
    by_time = int(steps_s / (60 * plan.save_every_minutes))
    return max(1, by_steps, by_time)


def hours_ratios(
    plan: TrainPlan, results: Sequence[TrialResult], *, saves: float
) -> tuple[list[float], str]:
    """Give, for every run, the hours with the plan's saves over those with others, and say how.

    Raises:
        NotMeasurableError: so many times the plan's saves, in whole ones, are as many.
    """
    mean_s = sum(r.timed_s / r.n_timed_steps for r in results) / len(results)
    save_s = sum(r.save_s or 0.0 for r in results) / len(results)
    n = n_saves(plan, plan.n_steps * mean_s)
    others = max(1, round(saves * n))
    plural = "" if n == 1 else "s"
    if others == n:
        raise NotMeasurableError(
            f"the plan takes {n} save{plural}, and {saves:g} times as many, in whole saves, are"
            f" {others}; set save_steps lower"
        )
    ratios = []
    for result in results:
        assert result.save_s is not None
        steps_s = plan.n_steps * result.timed_s / result.n_timed_steps
        ratios.append((steps_s + n * result.save_s) / (steps_s + others * result.save_s))
    how = (
        f"hours by arithmetic: {plan.n_steps} steps of {mean_s:.3g} s and {n} save{plural} of"
        f" {save_s:.3g} s, against {others}; evaluations and start-up left out"
    )
    return ratios, how


def read_speed_ratios(staged: Staged, *, n_repeats: int) -> tuple[list[float], str]:
    """Read rows past the page cache in both places, taking turns; give target over source.

    Raises:
        NotMeasurableError: rows were not copied, or cannot be read past the cache.
    """
    if staged.target is None:
        raise NotMeasurableError(f"rows are read in place: {staged.reason}")
    source = Path(staged.source, "train", ROWS_FILE)
    target = Path(staged.target, "train", ROWS_FILE)
    ratios, how = [], ""
    for i in range(n_repeats):
        speeds: dict[Path, float] = {}
        for place in (source, target)[:: 1 if i % 2 == 0 else -1]:
            speed, how = file_read_speed(place)
            if speed is None:
                raise NotMeasurableError(f"{place}: {how}")
            speeds[place] = speed
        ratios.append(speeds[target] / speeds[source])
    said = f"read speed of the rows, {how}; with rows in the page cache a step does not wait for it"
    return ratios, said
