"""Hold what somebody said against what was measured. Pure."""

import math
from typing import Any

from expertflow.studies.estimate import IS_ONE, quotient
from expertflow.studies.records import (
    PLAN,
    ClaimedRatio,
    ClaimVerdict,
    Estimate,
    Metric,
    VariantRecord,
)

Ratios = dict[str, Estimate | None]


def judged(claim: ClaimedRatio, records: dict[str, VariantRecord], ratios: Ratios) -> ClaimVerdict:
    """Say what was measured of a claim, or why nothing was.

    No change, where the interval holds 1; as claimed, where the estimate lies within what was said,
    though the interval may reach beyond;
    less or more, where the whole interval lies outside of it; else it is not decided. Measured,
    where nothing was said in figures.
    """
    told: dict[str, Any] = {
        "claim": claim.claim, "by": claim.by, "said": claim.said, "low": claim.low,
        "high": claim.high,
    }  # fmt: skip
    of, to = _record(claim.of, records), _record(claim.to, records)
    metrics = {record.variant.metric for record in (of, to) if record is not None}
    metric: Metric = next(iter(sorted(metrics - {"tokens_per_s"})), "tokens_per_s")
    hindrance = _hindrance(claim, of, to)
    if hindrance is not None:
        return ClaimVerdict(
            **told, measured=None, verdict="not measurable", reason=hindrance, metric=metric
        )
    one = _ratio(claim.of, ratios)
    other = _ratio(claim.to, ratios)
    assert one is not None and other is not None
    # A ratio to the plan needs no division, which would widen it by rounding alone.
    measured = one if other == IS_ONE else quotient(one, other)
    verdict, reason = verdict_on(measured, low=claim.low, high=claim.high)
    said = next((r.reason for r in (of, to) if r and r.variant.metric == metric and r.reason), None)
    if metric == "tokens_per_s":
        said = _qualified(of, to)
    reasons = [text for text in (reason, said) if text]
    return ClaimVerdict(
        **told,
        measured=measured,
        verdict=verdict,
        reason="; ".join(reasons) or None,
        metric=metric,
    )


def verdict_on(
    measured: Estimate, *, low: float | None, high: float | None
) -> tuple[Any, str | None]:
    """Give the verdict on a ratio, and what qualifies it.

    >>> e = Estimate(value=3.0, low=2.5, high=3.5, least=2.8, most=3.2)
    >>> verdict_on(e, low=1.2, high=2.0)[0]
    'more'
    """
    top = math.inf if high is None else high
    if measured.low <= 1 <= measured.high:
        if low is not None and measured.high >= low and measured.low <= top:
            return "no change", "the interval holds what was said, too; more repeats would tell"
        return "no change", None
    if low is None:
        return "measured", None
    if measured.high < low:
        return "less", None
    if measured.low > top:
        return "more", None
    if low <= measured.value <= top:
        reaches = measured.low < low or measured.high > top
        return "as claimed", "the interval reaches beyond what was said" if reaches else None
    return "not decided", "the interval reaches into what was said; more repeats would tell"


def _record(name: str, records: dict[str, VariantRecord]) -> VariantRecord | None:
    return None if name == PLAN else records[name]


def _ratio(name: str, ratios: Ratios) -> Estimate | None:
    return IS_ONE if name == PLAN else ratios[name]


def _hindrance(
    claim: ClaimedRatio, of: VariantRecord | None, to: VariantRecord | None
) -> str | None:
    """Say why a claim has no answer here, if it has none."""
    for record in (of, to):
        if record is not None and record.outcome not in ("measured", "is the plan"):
            return f"{record.variant.name}: {record.outcome}, {record.reason or 'no reason given'}"
    if all(record is None or record.outcome == "is the plan" for record in (of, to)):
        why = "; ".join(dict.fromkeys(r.reason for r in (of, to) if r is not None and r.reason))
        return f"{claim.of} and {claim.to} are one and the same here: {why}"
    if of is not None and to is not None and run_alike(of, to):
        return f"{claim.of} and {claim.to} are one and the same here"
    return None


def run_alike(one: VariantRecord, other: VariantRecord) -> bool:
    """Tell whether two variants of a plan were run with the same settings and rows."""
    return one.settings_sha256 is not None and one.settings_sha256 == other.settings_sha256


def _qualified(of: VariantRecord | None, to: VariantRecord | None) -> str | None:
    """Say which of the two is the plan, and what their rows changed besides."""
    both = [record for record in (of, to) if record is not None]
    said = [f"{r.variant.name} is the plan here" for r in both if r.outcome == "is the plan"][:1]
    said += [f"{r.variant.name}: {r.reason}" for r in both if r.outcome == "measured" and r.reason]
    return "; ".join(said) or None
