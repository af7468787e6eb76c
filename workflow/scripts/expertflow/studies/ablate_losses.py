"""Hold a variant's losses against the plan's after the same tokens."""

import math
from collections.abc import Sequence

import numpy as np

from expertflow.core.records import Record
from expertflow.plan.records import TrainPlan
from expertflow.studies.variants import differences
from expertflow.train.trial import TrialResult

# How far losses may lie apart, as a fraction of the plan's (judgements; docs/ablation.md).
ROUNDING, OTHER_ROUNDING, OTHER_ORDER, OTHER_UPDATES = 0.01, 0.05, 0.10, 0.25
# The part of a run whose mean loss is compared.
LAST_PART = 1 / 3
# Updates of as many tokens as the plan's, give or take: as many rows are not quite as many tokens.
SAME_UPDATES = 0.1
# With these, something else is learned.
LEARNS_OTHERWISE = {"method", "lora"}


class Compared(Record, frozen=True, kw_only=True):
    """How far a variant's loss is from the plan's, and what explains so much."""

    differs: float | None
    bound: float | None
    because: str
    is_sane: bool | None


def loss_last(result: TrialResult) -> float:
    """Give the mean loss of the last third of the timed steps."""
    n = max(1, math.ceil(result.n_timed_steps * LAST_PART))
    return float(np.mean(result.losses[-n:]))


def compared(
    pairs: Sequence[tuple[TrialResult, TrialResult]],
    *,
    base: TrainPlan,
    plan: TrainPlan,
    other_rows: bool,
) -> Compared:
    """Compare the losses of a variant, first of each pair, with the plan's."""
    differs = float(np.mean([_differs(own, plain) for own, plain in pairs]))
    own, plain = pairs[0]
    updates = (own.n_tokens / own.n_timed_steps) / (plain.n_tokens / plain.n_timed_steps)
    moved = differences(base, plan)
    if moved & LEARNS_OTHERWISE:
        return Compared(
            differs=differs, bound=None, because="another adapter learns otherwise", is_sane=None
        )
    bound, because = _bound(base, plan, moved, updates=updates, other_rows=other_rows)
    distance = differs if bound == OTHER_UPDATES else abs(differs)
    is_sane = math.isfinite(differs) and distance <= bound
    kept = differs if math.isfinite(differs) else None
    return Compared(differs=kept, bound=bound, because=because, is_sane=is_sane)


def _bound(
    base: TrainPlan, plan: TrainPlan, moved: set[str], *, updates: float, other_rows: bool
) -> tuple[float, str]:
    if abs(updates - 1) > SAME_UPDATES:
        return OTHER_UPDATES, "another number of updates for the same tokens; less is no fault"
    if other_rows:
        return OTHER_ORDER, "the same number of tokens a step, of documents in another order"
    if base.global_batch_sequences != plan.global_batch_sequences:
        return OTHER_ORDER, "another number of rows a step"
    if (
        base.precision != plan.precision
        or base.use_tf32 != plan.use_tf32
        or plan.precision != "fp32"
    ):
        return OTHER_ROUNDING, "the same rows in every step, rounded otherwise"
    if plan.optim == "adamw_8bit":
        return OTHER_ROUNDING, "the same rows in every step, moments in 8 bits"
    if plan.lora is not None and plan.lora.dropout:
        return OTHER_ROUNDING, "the same rows in every step, other draws of dropout"
    return ROUNDING, "the same rows in every step, in fp32"


def _differs(own: TrialResult, plain: TrialResult) -> float:
    """Give how far the losses lie apart at the end of what both have seen of tokens."""
    per_step = [result.n_tokens / result.n_timed_steps for result in (own, plain)]
    seen = [len(r.losses) * n for r, n in zip((own, plain), per_step, strict=True)]
    end = min(seen)
    means = []
    for result, n in zip((own, plain), per_step, strict=True):
        last = min(len(result.losses), max(1, round(end / n)))
        first = min(last - 1, round(end * (1 - LAST_PART) / n))
        means.append(float(np.mean(result.losses[first:last])))
    return means[0] / means[1] - 1 if means[1] else math.inf
