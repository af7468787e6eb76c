"""Compare timed runs with the plan's: ratios with intervals, losses, saves, read speed of rows.

Ratios of 2 and 1/2 are equally far from 1, so means and intervals are taken of logarithms, by
Student's t with one degree of freedom fewer than pairs.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from expertflow.core.settings import name_of
from expertflow.core.student import student_quantile
from expertflow.hardware.disk import measure_file
from expertflow.plan.cost import count_saves
from expertflow.plan.records import TrainPlan
from expertflow.plan.settings import Training
from expertflow.staging.records import Staged
from expertflow.studies.records import Estimate
from expertflow.studies.variants import NotMeasurableError, list_changes
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.train.records import TrialResult

# Allowed difference of losses, as a fraction of the plan's (judgments; docs/ablation.md).
ROUNDING, OTHER_ROUNDING, OTHER_ORDER, OTHER_UPDATES = 0.01, 0.05, 0.10, 0.25
# Final part of a run, whose mean loss is compared.
LAST_PART = 1 / 3
# Allowed difference in tokens per update, since equal numbers of rows differ slightly in tokens.
SAME_UPDATES = 0.1
# Settings that change what is learned.
LEARNS_OTHERWISE = {name_of(Training.method), name_of(Training.lora)}


def estimate_ratio(ratios: Sequence[float]) -> Estimate:
    """Return the geometric mean of ratios, its interval, and the extremes."""
    # In logarithms, so that inverting the ratios inverts the interval.
    logs = np.log(np.asarray(ratios, np.float64))
    mean = float(logs.mean())
    half = student_quantile(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Estimate(
        value=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        least=float(min(ratios)),
        most=float(max(ratios)),
    )


def compare_losses(
    pairs: Sequence[tuple[TrialResult, TrialResult]],
    *,
    base: TrainPlan,
    plan: TrainPlan,
    other_rows: bool,
) -> dict[str, object]:
    """Return the fields of a variant's record that compare its losses with the plan's."""
    differs = float(np.mean([_differs(own, plain) for own, plain in pairs]))
    if list_changes(base, plan) & LEARNS_OTHERWISE:
        return {"loss_differs": differs}
    own, plain = pairs[0]
    # Tokens per update, relative to the plan.
    updates = (own.n_tokens / own.n_timed_steps) / (plain.n_tokens / plain.n_timed_steps)
    bound, distance = ROUNDING, abs(differs)
    if abs(updates - 1) > SAME_UPDATES:
        # With more updates for the same tokens, a lower loss is not a fault.
        bound, distance = OTHER_UPDATES, differs
    elif other_rows or base.global_batch_sequences != plan.global_batch_sequences:
        bound = OTHER_ORDER
    elif (
        plan.precision != "fp32"
        or (base.precision, base.use_tf32) != (plan.precision, plan.use_tf32)
        # 8-bit moments, or other dropout masks.
        or plan.optim == "adamw_8bit"
        or (plan.lora is not None and plan.lora.dropout)
    ):
        bound = OTHER_ROUNDING
    return {
        "loss_differs": differs if math.isfinite(differs) else None,
        "loss_bound": bound,
        "is_sane": math.isfinite(differs) and distance <= bound,
    }


def _differs(own: TrialResult, plain: TrialResult) -> float:
    per_step = [result.n_tokens / result.n_timed_steps for result in (own, plain)]
    seen = [len(r.losses) * n for r, n in zip((own, plain), per_step, strict=True)]
    end = min(seen)  # the last token that both have learned from
    means = []
    for result, n in zip((own, plain), per_step, strict=True):
        last = min(len(result.losses), max(1, round(end / n)))
        first = min(last - 1, round(end * (1 - LAST_PART) / n))
        means.append(float(np.mean(result.losses[first:last])))
    return means[0] / means[1] - 1 if means[1] else math.inf


def hours_ratios(
    plan: TrainPlan, results: Sequence[TrialResult], *, saves: float
) -> tuple[list[float], str]:
    """Return each run's hours with the plan's number of saves over another's, and the method."""
    mean_s = sum(r.timed_s / r.n_timed_steps for r in results) / len(results)
    save_s = sum(r.save_s or 0.0 for r in results) / len(results)
    n = count_saves(plan, mean_s)
    # A whole number of saves, at least one.
    others = max(1, round(saves * n))
    plural = "" if n == 1 else "s"
    if others == n:
        raise NotMeasurableError(
            f"the plan has {n} save{plural}, and {saves:g} times as many, rounded, is also"
            f" {others}; lower save_steps"
        )
    ratios = []
    for result in results:
        assert result.save_s is not None
        steps_s = plan.n_steps * result.timed_s / result.n_timed_steps
        ratios.append((steps_s + n * result.save_s) / (steps_s + others * result.save_s))
    how = (
        f"hours computed from {plan.n_steps} steps of {mean_s:.3g} s and {n} save{plural} of"
        f" {save_s:.3g} s, against {others}; without evaluations and start-up"
    )
    return ratios, how


def read_speed_ratios(staged: Staged, *, n_repeats: int) -> tuple[list[float], str]:
    """Read rows in both places alternately, past the page cache; return target over source."""
    if staged.target is None:
        raise NotMeasurableError(f"rows are read in place: {staged.reason}")
    source = Path(staged.source, "train", ROWS_FILE)
    target = Path(staged.target, "train", ROWS_FILE)
    ratios, how = [], ""
    for i in range(n_repeats):
        speeds: dict[Path, float] = {}
        # Alternating order, so that a temporary slowdown of the disk hits both.
        for place in (source, target)[:: 1 if i % 2 == 0 else -1]:
            speed, how = measure_file(place)
            if speed is None:
                raise NotMeasurableError(f"{place}: {how}")
            speeds[place] = speed
        ratios.append(speeds[target] / speeds[source])
    method = f"read speed of the rows, {how}; a step does not wait for rows in the page cache"
    return ratios, method
