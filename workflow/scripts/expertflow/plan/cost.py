"""Convert work into hours and hours into dollars, with a band.

Without measurements on the same card, the band is what published bf16 training of 1-8B dense models
reaches: 20 to 45 % of the card's dense peak at the precision used. Recomputation (gradient
checkpointing) adds no model FLOPs but takes time, so hardware FLOPs are divided by the speed.
Without a known peak there is no estimate, and without a price no dollars.

A calibration replaces all of that by measured seconds: steps, saves, evaluations, and one-time
work. Its band is the quartiles of the steps, widened by 5 %.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from expertflow.core.errors import ConfigError
from expertflow.core.settings import name_of
from expertflow.hardware.records import GpuFacts
from expertflow.plan.claims import Speed, time_words
from expertflow.plan.records import Calibration, CostPlan, PlanSpec, TrainPlan
from expertflow.plan.settings import Training

MFU_LOW, MFU_MIDDLE, MFU_HIGH = 0.20, 0.30, 0.45
# Error allowed for a calibrated prediction besides the spread of the steps: a target.
CALIBRATED_BAND = 0.05

# Low, middle and high hours; null where unknown.
Band = tuple[float | None, float | None, float | None]


class Price(NamedTuple):
    usd_per_hour: float | None = None
    as_of: str | None = None
    billing_minutes: float | None = None

    def usd(self, hours: float | None) -> float | None:
        if hours is None or self.usd_per_hour is None:
            return None
        return round_up_hours(hours, self.billing_minutes) * self.usd_per_hour

    def band(self, hours: Band, prefix: str = "") -> dict[str, Any]:
        """Return hours and dollars by field: low, middle and high."""
        found: dict[str, Any] = {}
        for end, each in zip(("_low", "", "_high"), hours, strict=True):
            found |= {f"{prefix}hours{end}": each, f"{prefix}usd{end}": self.usd(each)}
        return found


def round_up_hours(hours: float, billing_minutes: float | None) -> float:
    """Round hours up to full billing steps, if there are any."""
    if billing_minutes is None:
        return hours
    # A hair over an integer number of steps is rounding error.
    return math.ceil(hours * 60 / billing_minutes - 1e-9) * billing_minutes / 60


def count_evals(plan: TrainPlan) -> int:
    """Count evaluations: one before the first step, the scheduled ones, one at the end."""
    return 1 + math.ceil(plan.n_steps / plan.eval_steps)


def count_saves(plan: TrainPlan, step_s: float) -> int:
    """Count saves by steps or by time, and the last one; each save restarts the clock."""
    by_time = math.floor(plan.save_every_minutes * 60 / step_s) + 1
    n_blocks, rest = divmod(plan.n_steps, plan.save_steps)
    return n_blocks * math.ceil(plan.save_steps / by_time) + math.ceil(rest / by_time)


def count_best_saves(plan: TrainPlan) -> int:
    evals = range(plan.eval_steps, plan.n_steps, plan.eval_steps)
    return sum(s % plan.save_steps != 0 for s in evals) if plan.load_best_model_at_end else 0


def peak_flops_per_s(gpu: GpuFacts | None, precision: str, *, use_tf32: bool) -> float | None:
    """Return the card's dense peak at a precision; null where no source lists it."""
    if gpu is None:
        return None
    tf32 = gpu.peak_tf32_flops_per_s if use_tf32 else None
    peaks = {"bf16": gpu.peak_bf16_flops_per_s, "fp16": gpu.peak_fp16_flops_per_s, "fp32": tf32}
    return peaks[precision]


def price_of(spec: PlanSpec, gpu: GpuFacts | None, n_cards: int) -> Price:
    """Return the user's price for this card: hourly per card, plus storage once."""
    row = spec.prices.get(gpu.name) if gpu else None
    if row is None:
        return Price()
    rate = row["usd_per_hour"] * n_cards + (row.get("storage_usd_per_hour") or 0.0)
    minutes = row.get("billing_minutes") or spec.billing_minutes
    return Price(rate, row["as_of"], minutes)


def price_of_plan(spec: PlanSpec, gpu: GpuFacts | None) -> Price:
    if spec.price_usd_per_hour is None:
        return price_of(spec, gpu, spec.world_size)
    return Price(spec.price_usd_per_hour, spec.price_as_of, spec.billing_minutes)


def plan_cost(
    spec: PlanSpec,
    plan: TrainPlan,
    *,
    calibration: Calibration | None = None,
    ignored: str | None = None,
) -> CostPlan:
    """Predict hours and dollars on ``world_size`` cards of one kind.

    Without a calibration, perfect scaling is assumed. The resulting ``price_usd_per_hour`` covers
    all cards, so wall time times price is the cost of the run. ``ignored`` says why an existing
    calibration does not count.
    """
    peak = peak_flops_per_s(plan.gpu, plan.precision, use_tf32=spec.use_tf32)
    whole_peak = None if peak is None else peak * spec.world_size
    if calibration is not None:
        hours, parts = _calibrated_cost(calibration, plan, whole_peak)
    else:
        hours, parts = _prior_cost(plan, whole_peak, ignored)
    price = price_of_plan(spec, plan.gpu)
    return CostPlan(
        price_usd_per_hour=price.usd_per_hour,
        price_as_of=price.as_of,
        billing_minutes=price.billing_minutes,
        **price.band(hours, "predicted_"),
        **parts,
    )


def prior_hours(flops: float, peak: float | None) -> Band:
    if peak is None:
        return None, None, None
    low, middle, high = (flops / (peak * share) / 3600 for share in (MFU_HIGH, MFU_MIDDLE, MFU_LOW))
    return low, middle, high


def _prior_cost(
    plan: TrainPlan, peak: float | None, ignored: str | None
) -> tuple[Band, dict[str, Any]]:
    flops = plan.flops_per_token_hardware * plan.predicted_tokens
    hours, again = prior_hours(flops, peak), flops / plan.model_flops - 1
    if plan.gpu is None:
        words = "no estimate on a CPU: its peak is not known; calibrate: true measures its speed"
    elif peak is None:
        words = (
            f"no estimate: the {plan.precision} peak of {plan.gpu.name} is not known; calibrate:"
            " true measures its speed"
        )
    else:
        words = (
            f"prior: {MFU_LOW:.0%} to {MFU_HIGH:.0%} of {plan.gpu.name}'s dense {plan.precision}"
            " peak, uncalibrated"
        )
        if again > 0:
            words += f"; checkpointing computes {again:.0%} more, which takes its time and is no"
            words += " model FLOP"
        words += "; start-up, saves and evaluation not included, as nothing was measured"
        if plan.world_size > 1:
            words += f"; {plan.world_size} cards, taken to share the work perfectly"
    return hours, {
        "reason": words if ignored is None else f"{words}; {ignored}",
        "mfu_fraction": None if peak is None else MFU_MIDDLE * plan.model_flops / flops,
        "step_hours": hours[1],
    }


def _calibrated_cost(
    measured: Calibration, plan: TrainPlan, peak: float | None
) -> tuple[Band, dict[str, Any]]:
    n_saves = count_saves(plan, measured.step_s)
    saves = n_saves * measured.save_s / 3600
    evals = count_evals(plan) * measured.eval_s / 3600
    startup = measured.startup_s / 3600
    # Occasional much slower steps affect the mean but no quartile.
    slow_s = max(measured.step_s_high, measured.step_s_mean)
    seconds = (measured.step_s_low, measured.step_s, slow_s)
    low, steps, high = (plan.n_steps * each / 3600 for each in seconds)
    rest = saves + evals + startup
    most = rest + count_best_saves(plan) * measured.save_s / 3600
    hours = (
        (min(low, steps) + rest) * (1 - CALIBRATED_BAND),
        steps + rest,
        (max(high, steps) + most) * (1 + CALIBRATED_BAND),
    )
    return hours, {
        "reason": _measured_reason(measured, plan, n_saves),
        "calibrated": True,
        "mfu_fraction": None if peak is None else plan.model_flops / (steps * 3600 * peak),
        "step_hours": steps,
        "save_hours": saves,
        "eval_hours": evals,
        "startup_hours": startup,
    }


def _measured_reason(measured: Calibration, plan: TrainPlan, n_saves: int) -> str:
    slow = measured.step_s_mean > measured.step_s_high
    some = f"; some took much longer, for a mean of {measured.step_s_mean:.4g} s" if slow else ""
    band = "the lower quartile to that mean" if slow else "the quartiles"
    over = f"{measured.n_timed_steps} steps"
    if measured.n_timings != measured.n_timed_steps:
        # Full epochs if those are short; on a card, the steps between two log lines.
        over = f"the means of {measured.n_timings} stretches of {over} in all"
    best = count_best_saves(plan)
    more = f"; up to {best} more saves, of the best so far, are in the high end" if best else ""
    return (
        f"calibrated on {measured.hardware}: {plan.n_steps:,} steps of {measured.step_s:.4g} s"
        f" (quartiles {measured.step_s_low:.4g} to {measured.step_s_high:.4g} s over"
        f" {over}{some}), {n_saves} x {measured.save_s:.3g} s of saving,"
        f" {count_evals(plan)} x {measured.eval_s:.3g} s of evaluation, and"
        f" {measured.startup_s:.3g} s that happen once; the band is {band} and"
        f" {CALIBRATED_BAND:.0%}{more}"
    )


def check_budgets(cost: CostPlan, spec: PlanSpec) -> Iterator[tuple[Any, str, str]]:
    """Yield setting, value and outcome of each budget; raise ConfigError unless it is met."""
    hours = (cost.predicted_hours, cost.predicted_hours_high, _hours_words)
    usd = (cost.predicted_usd, cost.predicted_usd_high, _usd_words)
    for setting, (value, high, show) in ((Training.max_hours, hours), (Training.max_usd, usd)):
        key, words = name_of(setting), "left out: the demo is on the CPU, where nothing can be held"
        words += " against it"
        if (budget := getattr(spec, key)) is None:
            continue
        if value is None or high is None:
            lacks = "no price is configured for it"
            if cost.predicted_hours is None:
                lacks = "the speed of this hardware is not known (calibrate: true measures it)"
            if not spec.may_drop_budgets:
                raise ConfigError(
                    f"training.{key} is set and nothing can be held against it: {lacks}; give what"
                    f" is missing, or set {key} to null"
                )
        elif value > budget:
            raise ConfigError(
                f"training.{key} is {budget:g} and the plan needs {show(value)}; raise"
                " it, or train fewer tokens"
            )
        else:
            words = f"the prediction is {show(value)}, at most {show(high)}"
            if high > budget:
                words += ": within the budget in the middle, above it at the high end"
        yield setting, f"{budget:g}", words


def _hours_words(hours: float) -> str:
    return f"{hours:.4g} hours ({time_words(hours)})"


def _usd_words(usd: float) -> str:
    return f"${usd:.2f}" if usd >= 1 else f"${usd:.3g}"


def speed_of(plan: TrainPlan) -> Speed:
    hours = plan.cost.step_hours
    return Speed(
        hardware=plan.hardware,
        flops_per_token=plan.flops_per_token_model,
        peak_flops_per_s=peak_flops_per_s(plan.gpu, plan.precision, use_tf32=plan.use_tf32),
        tokens_per_s=None
        if hours is None
        else plan.predicted_tokens / (hours * 3600) / plan.world_size,
    )
