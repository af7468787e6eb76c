"""Join the records of all variants to what every switch is worth here, beside what was claimed."""

from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.records import Record
from expertflow.plan.records import TrainPlan
from expertflow.studies.ablate_claims import judged, run_alike
from expertflow.studies.estimate import IS_ONE, quotient
from expertflow.studies.records import (
    AblationRecord,
    AblationSpec,
    Bar,
    Estimate,
    Timing,
    Variant,
    VariantRecord,
)

PER_MILLION = 1e6
HOUR_S = 3600
AS_BEFORE = "as the rung before on this hardware"
METHOD_NOTE = (
    "ratios are geometric means over pairs of runs that took turns, with 95 % intervals of"
    " Student's t on their logarithms; tokens are those of documents, without padding"
)


class Measured(Record, frozen=True, kw_only=True):
    """All that was measured: the records in the order of the variants, and what they are of."""

    expert: str
    plan: TrainPlan
    model: str
    records: tuple[VariantRecord, ...]


def ablation(spec: AblationSpec, measured: Measured) -> AblationRecord:
    """Make the ablation of an expert.

    Raises:
        DataError: a record is missing, or of another plan than the others.
    """
    plan, by_name = measured.plan, {r.variant.name: r for r in measured.records}
    _check(spec, by_name, measured)
    by_name = _without_noise(spec, by_name)
    speed = _plan_speed(measured.records)
    ratios = {name: ratio_of(record) for name, record in by_name.items()}
    # The price may be of all cards, and the runs are of one.
    price = plan.cost.price_usd_per_hour if plan.world_size == 1 else None
    bars = tuple(
        _bar(variant, by_name[variant.name], _before(spec, variant), ratios, speed, price)
        for variant in spec.variants
    )
    first = next((r for r in measured.records if r.device is not None), measured.records[0])
    return AblationRecord(
        expert=measured.expert,
        preset=spec.preset,
        model=measured.model,
        hardware=plan.hardware,
        device=first.device,
        gpu_name=first.gpu_name,
        method=plan.method,
        sequence_length_tokens=plan.sequence_length_tokens,
        global_batch_sequences=plan.global_batch_sequences,
        n_repeats=spec.n_repeats,
        n_warmup_steps=spec.n_warmup_steps,
        n_timed_steps=spec.n_timed_steps,
        price_usd_per_hour=price,
        price_as_of=None if price is None else plan.cost.price_as_of,
        plan_tokens_per_s=speed,
        plan_usd_per_million_tokens=_usd(speed, price),
        ladders=_ladders(spec),
        bars=bars,
        claims=tuple(judged(claim, by_name, ratios) for claim in spec.claims),
        versions=_versions(measured.records),
        unavailable=_unavailable(plan, speed, price),
        machine=first.machine,
        notes=_notes(plan, measured.records),
    )


def ratio_of(record: VariantRecord) -> Estimate | None:
    """Give a variant's ratio to the plan, which is 1 where it is the plan."""
    return IS_ONE if record.outcome == "is the plan" else record.ratio


def _check(spec: AblationSpec, by_name: dict[str, VariantRecord], measured: Measured) -> None:
    for variant in spec.variants:
        if variant.name not in by_name:
            raise DataError(
                f"{measured.expert}: variant {variant.name!r} has no record; run ablate_variant"
            )
    plans = {record.plan_sha256 for record in measured.records}
    if len(plans) > 1:
        raise DataError(
            f"{measured.expert}: the variants' records are of {len(plans)} different plans; delete"
            f" results/{measured.expert}/ablation and run again"
        )


def _plan_speed(records: Sequence[VariantRecord]) -> float | None:
    speeds = [timing.tokens_per_s for record in records for timing in record.plan_timings]
    return median(speeds) if speeds else None


def _before(spec: AblationSpec, variant: Variant) -> Variant | None:
    """Find the rung before a variant, where it is a rung."""
    if variant.rung is None:
        return None
    rungs = (v for v in spec.variants if v.of == variant.of and v.rung == (variant.rung or 0) - 1)
    return next(rungs, None)


def _without_noise(
    spec: AblationSpec, by_name: dict[str, VariantRecord]
) -> dict[str, VariantRecord]:
    """Give a rung that was run as the one before that one's figures: they differ by noise alone."""
    found = dict(by_name)
    for variant in spec.variants:
        before, own = _before(spec, variant), found[variant.name]
        earlier = None if before is None else found[before.name]
        if earlier and earlier.outcome == own.outcome == "measured" and run_alike(earlier, own):
            reason = "; ".join(filter(None, (AS_BEFORE, own.reason)))
            found[variant.name] = replace(earlier, variant=own.variant, reason=reason)
    return found


def _bar(
    variant: Variant,
    record: VariantRecord,
    before: Variant | None,
    ratios: dict[str, Estimate | None],
    speed: float | None,
    price: float | None,
) -> Bar:
    ratio = ratios[variant.name]
    earlier = None if before is None else ratios[before.name]
    step = None
    if ratio is not None and earlier is not None and ratio != earlier:
        step = quotient(ratio, earlier)
    tokens_per_s = None
    if ratio is not None and speed is not None and variant.metric == "tokens_per_s":
        tokens_per_s = speed * ratio.value
    own = record.timings
    if record.outcome == "is the plan" or variant.metric == "hours":
        own = record.plan_timings
    return Bar(
        name=variant.name,
        label=variant.label,
        of=variant.of,
        outcome=record.outcome,
        reason=record.reason,
        tokens_per_s=tokens_per_s,
        # That the plan is as fast as the plan was not measured.
        ratio=record.ratio,
        step=step,
        usd_per_million_tokens=_usd(tokens_per_s, price),
        peak_memory_bytes=_peak(own),
        padding_fraction=_mean([timing.padding_fraction for timing in own]),
        data_wait_fraction=_mean([timing.data_wait_fraction for timing in own]),
        is_sane=record.is_sane,
        metric=variant.metric,
        loss_differs=record.loss_differs,
        loss_bound=record.loss_bound,
    )


def _usd(tokens_per_s: float | None, price: float | None) -> float | None:
    if tokens_per_s is None or price is None:
        return None
    return price / HOUR_S / tokens_per_s * PER_MILLION


def _peak(timings: Sequence[Timing]) -> int | None:
    peaks = [t.peak_memory_bytes for t in timings if t.peak_memory_bytes is not None]
    return max(peaks) if peaks else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ladders(spec: AblationSpec) -> tuple[tuple[str, ...], ...]:
    names = dict.fromkeys(variant.of for variant in spec.variants if variant.of is not None)
    return tuple(tuple(v.name for v in spec.variants if v.of == name) for name in names)


def _versions(records: Sequence[VariantRecord]) -> dict[str, str]:
    """Give the releases that variants were run with, all of them where they differ."""
    names = sorted({name for record in records for name in record.versions})
    return {
        name: ", ".join(dict.fromkeys(r.versions[name] for r in records if name in r.versions))
        for name in names
    }


def _unavailable(plan: TrainPlan, speed: float | None, price: float | None) -> dict[str, str]:
    missing = {}
    if speed is None:
        missing["plan_tokens_per_s"] = "no variant was measured against the plan"
    if price is None and plan.world_size > 1:
        missing["usd_per_million_tokens"] = (
            f"the price was for {plan.world_size} processes, and all runs here are of one"
        )
    elif price is None:
        missing["usd_per_million_tokens"] = (
            "no price is known for this hardware; set price_usd_per_hour, or a row of"
            " config/hardware/prices.yaml"
        )
    return missing


def _notes(plan: TrainPlan, records: Sequence[VariantRecord]) -> tuple[str, ...]:
    notes = [METHOD_NOTE]
    if plan.world_size > 1:
        notes.append(
            f"the plan is for {plan.world_size} processes; all runs here are of one, with its"
            " micro-batch and accumulation and so a global batch of"
            f" {plan.batch_size * plan.gradient_accumulation_steps} rows"
        )
    if any(record.versions != records[0].versions for record in records):
        notes.append("variants were run with different releases of the packages")
    odd = [record.variant.name for record in records if record.is_sane is False]
    if odd:
        notes.append(
            f"the loss of {', '.join(odd)} is further from the plan's than explained; do not trade"
            " speed for it"
        )
    return tuple(notes)
