"""Read an ablation: ladders up to the plan with the gain of each step, and single changes.

Speeds are the plan's, times the ratio of each variant's pairs. A machine that slows down between
two variants then distorts no step, and the steps of a ladder multiply to the total.
"""

import math
from typing import Any

from expertflow.core.records import Record
from expertflow.report import format as f
from expertflow.studies.records import IS_ONE, AblationRecord, Bar, Estimate

IS_PLAN = "is the plan"
# What a ratio measures if not training speed.
METRICS = {"tokens_per_s": "", "hours": "hours of an entire run", "read_speed": "reading the rows"}
# Smallest gain reported as one: intervals over a few repeats do not cover day-to-day drift.
NOTABLE = 1.03


class Step(Record, frozen=True, kw_only=True):
    """A bar of a waterfall; ``before`` is the speed of the previous measured rung."""

    label: str
    tokens_per_s: float | None
    low: float | None = None
    high: float | None = None
    before: float | None
    factor: Estimate | None
    outcome: str = "measured"
    reason: str | None = None
    is_plan: bool = False


class Ladder(Record, frozen=True, kw_only=True):
    """A ladder from its first rung up to the plan; ``whole`` compares the plan with ``start``."""

    steps: tuple[Step, ...]
    start: Step
    whole: Estimate


def single_changes(record: AblationRecord) -> tuple[Bar, ...]:
    """Return the variants that change one setting, slowest first, unmeasured ones last."""
    # ``of`` is the ladder of a rung.
    single = [bar for bar in record.bars if bar.of is None]
    return tuple(sorted(single, key=lambda bar: bar.ratio.value if bar.ratio else math.inf))


def label_bar(bar: Bar) -> str:
    return f"{bar.label} ({METRICS[bar.metric]})" if METRICS[bar.metric] else bar.label


def is_faster(bar: Bar) -> bool:
    ratio, is_speed = bar.ratio, bar.metric == "tokens_per_s"
    # Null: the losses were not compared, which does not count against it.
    return is_speed and ratio is not None and ratio.low > NOTABLE and bar.is_sane is not False


def rung_ratio(bar: Bar) -> Estimate | None:
    return IS_ONE if bar.outcome == IS_PLAN else bar.ratio


def makes_no_difference(ratio: Estimate) -> bool:
    return ratio.low <= 1 <= ratio.high


def build_ladders(record: AblationRecord) -> tuple[Ladder, ...]:
    bars = {bar.name: bar for bar in record.bars}
    found = []
    for names in record.ladders:
        rungs = [bars[name] for name in names]
        if record.plan_tokens_per_s is not None and any(map(rung_ratio, rungs)):
            found.append(_ladder(rungs, record.plan_tokens_per_s))
    return tuple(found)


def find_telling_ladder(record: AblationRecord) -> Ladder | None:
    """Return the first ladder with at least one rung that differs from the plan."""
    return next((ladder for ladder in build_ladders(record) if steps_that_count(ladder)), None)


def _ladder(rungs: list[Bar], plan_tokens_per_s: float) -> Ladder:
    known = [ratio for bar in rungs if (ratio := rung_ratio(bar))]
    last: Estimate | None = None

    def make_step(label: str, ratio: Estimate | None, **more: Any) -> Step:
        # The plan against itself has no interval to draw.
        spread = None if ratio is IS_ONE else ratio
        return Step(
            label=label,
            tokens_per_s=plan_tokens_per_s * ratio.value if ratio else None,
            low=plan_tokens_per_s * spread.low if spread else None,
            high=plan_tokens_per_s * spread.high if spread else None,
            before=plan_tokens_per_s * last.value if last else None,
            # None without a change: the plan repeated, or a rung that runs like the one before.
            factor=ratio.divide_by(last) if ratio and last and ratio != last else None,
            **more,
        )

    steps = []
    for bar in rungs:
        ratio = rung_ratio(bar)
        steps.append(make_step(bar.label, ratio, outcome=bar.outcome, reason=bar.reason))
        # A rung that was not measured is left out: the next one follows the one before it.
        last = ratio or last
    steps.append(make_step("the plan", IS_ONE, is_plan=True))
    start = next(step for step in steps if step.tokens_per_s is not None)
    return Ladder(steps=tuple(steps), start=start, whole=IS_ONE.divide_by(known[0]))


def format_interval(ratio: Estimate) -> str:
    return f"{bare_factor(ratio.low)} to {bare_factor(ratio.high)}"


def bare_factor(ratio: float) -> str:
    return f.factor(ratio)[1:]


def steps_that_count(ladder: Ladder) -> list[tuple[str, Estimate]]:
    found = [(step.label, step.factor) for step in ladder.steps if step.factor]
    return sorted(found, key=lambda item: -item[1].value)


def quote(label: str) -> str:
    return f"\u201c{label}\u201d"
