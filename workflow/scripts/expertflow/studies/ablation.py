"""Combine the variants' records into what each switch is worth here, next to the claims."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.records import fill_record
from expertflow.plan.records import TrainPlan
from expertflow.studies.records import (
    IS_ONE,
    AblationRecord,
    AblationSpec,
    Bar,
    ClaimedRatio,
    ClaimVerdict,
    Estimate,
    Metric,
    Variant,
    VariantRecord,
)

PER_MILLION = 1e6
HOUR_S = 3600
AS_BEFORE = "same as the previous rung on this hardware"
METHOD_NOTE = (
    "ratios are geometric means over pairs of alternating runs, with 95 % intervals from"
    " Student's t on their logarithms; tokens exclude padding"
)


def join_ablation(
    spec: AblationSpec, *, plan: TrainPlan, model: str, records: Sequence[VariantRecord]
) -> AblationRecord:
    """Combine the records; raise DataError if one is missing or belongs to another plan."""
    expert, by_name = plan.expert, {r.variant.name: r for r in records}
    for variant in spec.variants:
        if variant.name not in by_name:
            raise DataError(f"{expert}: variant {variant.name!r} has no record; run ablate_variant")
    plans = {record.plan_sha256 for record in records}
    if len(plans) > 1:
        raise DataError(
            f"{expert}: the variants' records come from {len(plans)} different plans; delete"
            f" results/{expert}/ablation and run again"
        )
    speeds = [t.tokens_per_s for record in records for t in record.plan_timings]
    runs = [t for record in records for t in (*record.timings, *record.plan_timings)]
    speed = median(speeds) if speeds else None
    # The price may be for all cards, but the runs use one.
    price = plan.cost.price_usd_per_hour if plan.world_size == 1 else None
    ladders: dict[str | None, list[str]] = {}
    rungs: dict[tuple[str | None, int | None], VariantRecord] = {}
    bars = []
    for variant in spec.variants:
        record, before = by_name[variant.name], rungs.get((variant.of, (variant.rung or 0) - 1))
        if before and before.outcome == record.outcome == "measured" and _run_alike(before, record):
            # It differs from the previous rung by noise alone.
            reason = "; ".join(filter(None, (AS_BEFORE, record.reason)))
            record = replace(before, variant=record.variant, reason=reason)
        by_name[variant.name] = rungs[variant.of, variant.rung] = record
        bars.append(_bar(variant, record, before, speed, price))
        if variant.of is not None:
            ladders.setdefault(variant.of, []).append(variant.name)
    return fill_record(
        AblationRecord,
        # Before the plan, whose warm-up steps are the learning rate's.
        spec,
        plan,
        records[0],
        model=model,
        device=runs[0].device if runs else None,
        gpu_name=runs[0].gpu_name if runs else None,
        price_usd_per_hour=price,
        price_as_of=None if price is None else plan.cost.price_as_of,
        plan_tokens_per_s=speed,
        plan_usd_per_million_tokens=_usd(speed, price),
        ladders=tuple(map(tuple, ladders.values())),
        bars=tuple(bars),
        claims=tuple(judge_claim(claim, by_name) for claim in spec.claims),
        versions=_versions(records),
        unavailable=_unavailable(plan, speed, price),
        notes=_notes(plan, records),
    )


def _bar(
    variant: Variant,
    record: VariantRecord,
    before: VariantRecord | None,
    speed: float | None,
    price: float | None,
) -> Bar:
    ratio, earlier = _ratio(record), before and _ratio(before)
    tokens_per_s = None
    if ratio is not None and speed is not None and variant.metric == "tokens_per_s":
        tokens_per_s = speed * ratio.value
    own = record.timings  # its memory and padding, not the plan's
    if record.outcome == "is the plan" or variant.metric == "hours":
        own = record.plan_timings
    peaks = [t.peak_memory_bytes for t in own if t.peak_memory_bytes is not None]
    return fill_record(
        Bar,
        variant,
        # Its ratio is null for the plan itself, which was not measured against itself.
        record,
        tokens_per_s=tokens_per_s,
        step=ratio.divide_by(earlier) if ratio and earlier and ratio != earlier else None,
        usd_per_million_tokens=_usd(tokens_per_s, price),
        peak_memory_bytes=max(peaks, default=None),
        padding_fraction=_mean([t.padding_fraction for t in own]),
        data_wait_fraction=_mean([min(1.0, t.data_wait_s / t.timed_s) for t in own]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(record: VariantRecord | None) -> Estimate | None:
    return IS_ONE if record is None or record.outcome == "is the plan" else record.ratio


def _usd(tokens_per_s: float | None, price: float | None) -> float | None:
    if tokens_per_s is None or price is None:
        return None
    return price / HOUR_S / tokens_per_s * PER_MILLION


def _versions(records: Sequence[VariantRecord]) -> dict[str, str]:
    found = {name: [r.versions[name] for r in records] for name in sorted(records[0].versions)}
    return {name: ", ".join(dict.fromkeys(versions)) for name, versions in found.items()}


def _unavailable(plan: TrainPlan, speed: float | None, price: float | None) -> dict[str, str]:
    missing = {}
    if speed is None:
        missing["plan_tokens_per_s"] = "no variant was measured against the plan"
    if price is None:
        missing["usd_per_million_tokens"] = (
            f"the price is for {plan.world_size} processes, and all runs here use one"
            if plan.world_size > 1
            else "no price is known for this hardware; set price_usd_per_hour, or add a row to"
            " config/hardware/prices.yaml"
        )
    return missing


def _notes(plan: TrainPlan, records: Sequence[VariantRecord]) -> tuple[str, ...]:
    notes = [METHOD_NOTE]
    if plan.world_size > 1:
        notes.append(
            f"the plan is for {plan.world_size} processes; all runs here use one, with its"
            " micro-batch and accumulation, so the global batch is"
            f" {plan.batch_size * plan.gradient_accumulation_steps} rows"
        )
    if any(record.versions != records[0].versions for record in records):
        notes.append("variants were run with different package versions")
    odd = [record.variant.name for record in records if record.is_sane is False]
    if odd:
        notes.append(
            f"the loss of {', '.join(odd)} differs from the plan's by more than can be explained;"
            " do not adopt it for speed"
        )
    return tuple(notes)


def judge_claim(claim: ClaimedRatio, records: dict[str, VariantRecord]) -> ClaimVerdict:
    """Return a claim's measurement, or why there is none; the plan has no record.

    No change if the interval contains 1 and the claim does not; as claimed if the estimate is
    within the claim; less or more if the complete interval is outside; else undecided. A claim
    without figures is only measured.
    """
    of, to = records.get(claim.of), records.get(claim.to)
    both = [record for record in (of, to) if record is not None]
    metric: Metric = min((record.variant.metric for record in both), default="tokens_per_s")
    reason = _unavailable_reason(claim, both)
    if reason is not None:
        unknown = {"measured": None, "verdict": "not measurable"}
        return fill_record(ClaimVerdict, claim, **unknown, reason=reason, metric=metric)
    one, other = _ratio(of), _ratio(to)
    assert one is not None and other is not None
    # A ratio to the plan needs no division, which would only add rounding.
    measured = one if other == IS_ONE else one.divide_by(other)
    verdict, reason = _verdict(measured, low=claim.low, high=claim.high)
    if metric == "tokens_per_s":
        # Which of the two is the plan, and what else their rows changed.
        notes = [f"{r.variant.name} is the plan here" for r in both if r.outcome == "is the plan"]
        forced = [r for r in both if r.outcome == "measured" and r.reason]
        notes = [*notes[:1], *(f"{r.variant.name}: {r.reason}" for r in forced)]
    else:
        notes = [r.reason for r in both if r.reason][:1]
    reasons = "; ".join(filter(None, (reason, *notes))) or None
    return fill_record(
        ClaimVerdict, claim, measured=measured, verdict=verdict, reason=reasons, metric=metric
    )


def _verdict(
    measured: Estimate, *, low: float | None, high: float | None
) -> tuple[Any, str | None]:
    top = math.inf if high is None else high  # "at least 2x" has no upper end
    # Checked first: a ratio that may be 1 confirms no claim of a change.
    is_change = low is None or not low < 1 < top
    if is_change and measured.low <= 1 <= measured.high:
        if low is not None and measured.high >= low and measured.low <= top:
            return "no change", "the interval also contains the claim; more repeats would decide"
        return "no change", None
    if low is None:
        return "measured", None
    if measured.high < low:
        return "less", None
    if measured.low > top:
        return "more", None
    if low <= measured.value <= top:
        reaches = measured.low < low or measured.high > top
        return "as claimed", "the interval extends beyond the claim" if reaches else None
    return "not decided", "the interval overlaps the claim; more repeats would decide"


def _unavailable_reason(claim: ClaimedRatio, both: Sequence[VariantRecord]) -> str | None:
    if claim.unmeasured is not None:
        return claim.unmeasured
    # A ratio needs both sides.
    for record in both:
        if record.outcome not in ("measured", "is the plan"):
            return f"{record.variant.name}: {record.outcome}, {record.reason or 'no reason given'}"
    same = f"{claim.of} and {claim.to} are the same here"
    if all(record.outcome == "is the plan" for record in both):
        return f"{same}: {'; '.join(dict.fromkeys(r.reason for r in both if r.reason))}"
    if len({record.variant.metric for record in both}) > 1:
        return f"{claim.of} and {claim.to} do not measure the same thing"
    return same if len(both) > 1 and _run_alike(*both) else None


def _run_alike(one: VariantRecord, other: VariantRecord) -> bool:
    return one.settings_sha256 is not None and one.settings_sha256 == other.settings_sha256
