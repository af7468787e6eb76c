"""Turn work into hours and hours into dollars, with a band.

Until a run on the same card has been measured, the band is what published bf16 training of 1-8B
dense models reaches: 20 to 45 % of the card's dense peak at the precision that is used. What is
computed again (gradient checkpointing) is no model FLOP and takes its time all the same, so it is
the hardware FLOPs that are divided by the speed. Without a known peak there is no estimate, and
without a price no dollars.

A calibration replaces all of that by measured seconds: steps, saves, evaluations, and what happens
once. Its band is the quartiles of the steps and 5 %.
"""

import math
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.core.records import Record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.arithmetic import check_cost, time_words
from expertflow.plan.cost_records import Calibration, CostPlan
from expertflow.plan.records import PlanSpec, Precision

MFU_LOW, MFU_MIDDLE, MFU_HIGH = 0.20, 0.30, 0.45
# What a calibrated prediction may be off by besides the spread of the steps; a target, not a law.
CALIBRATED_BAND = 0.05


class Work(Record, frozen=True, kw_only=True):
    """What a run does, however fast; FLOPs are those of all steps together."""

    flops_model: float
    flops_hardware: float
    n_steps: int
    save_steps: int
    save_every_minutes: float
    eval_steps: int
    precision: Precision
    saves_best: bool = False

    @property
    def n_evals(self) -> int:
        """Count evaluations: one before the first step, those that are due, one at the end."""
        return 1 + math.ceil(self.n_steps / self.eval_steps)

    def n_saves(self, step_s: float) -> int:
        """Count saves: those that are due by steps or by time, and one at the end.

        Each save, whatever it is due by, sets the clock back: time begins anew with every block of
        ``save_steps``.
        """
        by_time = math.floor(self.save_every_minutes * 60 / step_s) + 1
        n_blocks, rest = divmod(self.n_steps, self.save_steps)
        return n_blocks * math.ceil(self.save_steps / by_time) + math.ceil(rest / by_time)

    @property
    def n_saves_best_max(self) -> int:
        """Count the saves that come on top if every evaluation is the best so far."""
        if not self.saves_best:
            return 0
        due = range(self.eval_steps, self.n_steps, self.eval_steps)
        return sum(step % self.save_steps != 0 for step in due)


class Price(Record, frozen=True, kw_only=True):
    """Dollars an hour of all cards together, and when they were seen."""

    usd_per_hour: float | None
    as_of: str | None
    billing_minutes: float | None = None

    def usd(self, hours: float | None) -> float | None:
        """Price hours, rounded up to whole billing steps."""
        if hours is None or self.usd_per_hour is None:
            return None
        return billed_hours(hours, self.billing_minutes) * self.usd_per_hour


def billed_hours(hours: float, billing_minutes: float | None) -> float:
    """Round hours up to whole billing steps, where there are any."""
    if billing_minutes is None:
        return hours
    # A hair over a whole number of steps is rounding.
    return math.ceil(hours * 60 / billing_minutes - 1e-9) * billing_minutes / 60


def peak_flops_per_s(gpu: GpuFacts | None, precision: str, *, use_tf32: bool) -> float | None:
    """Give the card's dense peak at a precision; null where no source gives it."""
    if gpu is None:
        return None
    tf32 = gpu.peak_tf32_flops_per_s if use_tf32 else None
    peaks = {"bf16": gpu.peak_bf16_flops_per_s, "fp16": gpu.peak_fp16_flops_per_s, "fp32": tf32}
    return peaks[precision]


def price_of(spec: PlanSpec, gpu: GpuFacts | None, n_cards: int) -> Price:
    """Take the user's row for this card: so much a card, and storage once."""
    row = spec.prices.get(gpu.name) if gpu else None
    if row is None:
        return Price(usd_per_hour=None, as_of=None)
    rate = row["usd_per_hour"] * n_cards + (row.get("storage_usd_per_hour") or 0.0)
    minutes = row.get("billing_minutes") or spec.billing_minutes
    return Price(usd_per_hour=rate, as_of=row["as_of"], billing_minutes=minutes)


def planned_price(spec: PlanSpec, gpu: GpuFacts | None) -> Price:
    """Give the price of the hardware that is planned for: the machine's own, else by its cards."""
    if spec.price_usd_per_hour is None:
        return price_of(spec, gpu, spec.world_size)
    return Price(
        usd_per_hour=spec.price_usd_per_hour,
        as_of=spec.price_as_of,
        billing_minutes=spec.billing_minutes,
    )


def plan_cost(
    *,
    spec: PlanSpec,
    gpu: GpuFacts | None,
    work: Work,
    calibration: Calibration | None = None,
    ignored: str | None = None,
) -> CostPlan:
    """Predict hours and dollars on ``world_size`` cards of one kind.

    Without a calibration the cards are taken to share the work perfectly. ``price_usd_per_hour`` of
    the result is that of all of them together, so that wall time times price is what the run costs.
    ``ignored`` says why a calibration that is there does not count.

    Raises:
        ConfigError: the prediction is above the manifest's budget.
    """
    price = planned_price(spec, gpu)
    peak = peak_flops_per_s(gpu, work.precision, use_tf32=spec.use_tf32)
    whole_peak = None if peak is None else peak * spec.world_size
    if calibration is not None:
        cost = _calibrated(calibration, work, whole_peak, price)
    else:
        cost = _prior(gpu, work, whole_peak, spec.world_size, price, ignored)
    check_cost(cost)
    _keep_budget(cost, spec, whole_peak)
    return cost


def prior_hours(work: Work, peak: float | None) -> tuple[float, float, float] | None:
    """Give low, middle and high hours of the steps; null without a peak."""
    if peak is None:
        return None
    low, middle, high = (
        work.flops_hardware / (peak * share) / 3600 for share in (MFU_HIGH, MFU_MIDDLE, MFU_LOW)
    )
    return low, middle, high


def _prior(
    gpu: GpuFacts | None,
    work: Work,
    peak: float | None,
    n_cards: int,
    price: Price,
    ignored: str | None,
) -> CostPlan:
    low, middle, high = prior_hours(work, peak) or (None, None, None)
    reason = _prior_reason(gpu, work, peak, n_cards)
    return _priced(
        price,
        (low, middle, high),
        reason=reason if ignored is None else f"{reason}; {ignored}",
        mfu_fraction=None if peak is None else MFU_MIDDLE * work.flops_model / work.flops_hardware,
        step_hours=middle,
    )


def _calibrated(measured: Calibration, work: Work, peak: float | None, price: Price) -> CostPlan:
    n_saves = work.n_saves(measured.step_s)
    saves = n_saves * measured.save_s / 3600
    evals = work.n_evals * measured.eval_s / 3600
    startup = measured.startup_s / 3600
    # Steps that now and then take much longer are in the mean, and in no quartile.
    slow_s = max(measured.step_s_high, measured.step_s_mean)
    seconds = (measured.step_s_low, measured.step_s, slow_s)
    low, steps, high = (work.n_steps * each / 3600 for each in seconds)
    rest = saves + evals + startup
    hours = steps + rest
    low = (min(low, steps) + rest) * (1 - CALIBRATED_BAND)
    most = rest + work.n_saves_best_max * measured.save_s / 3600
    high = (max(high, steps) + most) * (1 + CALIBRATED_BAND)
    mfu = None if peak is None else work.flops_model / (steps * 3600 * peak)
    return _priced(
        price,
        (low, hours, high),
        reason=_calibrated_reason(measured, work, n_saves),
        calibrated=True,
        mfu_fraction=mfu,
        step_hours=steps,
        save_hours=saves,
        eval_hours=evals,
        startup_hours=startup,
    )


def _priced(
    price: Price, hours: tuple[float | None, float | None, float | None], **parts: Any
) -> CostPlan:
    """Price low, middle and high hours; ``parts`` are the other fields of the result."""
    low, middle, high = hours
    return CostPlan(
        price_usd_per_hour=price.usd_per_hour,
        price_as_of=price.as_of,
        predicted_hours=middle,
        predicted_hours_low=low,
        predicted_hours_high=high,
        predicted_usd=price.usd(middle),
        predicted_usd_low=price.usd(low),
        predicted_usd_high=price.usd(high),
        billing_minutes=price.billing_minutes,
        **parts,
    )


def _calibrated_reason(measured: Calibration, work: Work, n_saves: int) -> str:
    slow = measured.step_s_mean > measured.step_s_high
    some = f"; some took much longer, for a mean of {measured.step_s_mean:.4g} s" if slow else ""
    band = "the lower quartile to that mean" if slow else "the quartiles"
    over = f"{measured.n_timed_steps} steps"
    if measured.n_timings != measured.n_timed_steps:
        # Whole epochs where those are short; on a card, what lies between two log lines.
        over = f"the means of {measured.n_timings} stretches of {over} in all"
    best = work.n_saves_best_max
    more = f"; up to {best} more saves, of the best so far, are in the high end" if best else ""
    return (
        f"calibrated on {measured.hardware}: {work.n_steps:,} steps of {measured.step_s:.4g} s"
        f" (quartiles {measured.step_s_low:.4g} to {measured.step_s_high:.4g} s over"
        f" {over}{some}), {n_saves} x {measured.save_s:.3g} s of saving,"
        f" {work.n_evals} x {measured.eval_s:.3g} s of evaluation, and"
        f" {measured.startup_s:.3g} s that happen once; the band is {band} and"
        f" {CALIBRATED_BAND:.0%}{more}"
    )


def _keep_budget(cost: CostPlan, spec: PlanSpec, peak: float | None) -> None:
    for value, budget, key in (
        (cost.predicted_hours, spec.max_hours, "max_hours"),
        (cost.predicted_usd, spec.max_usd, "max_usd"),
    ):
        if budget is not None and value is None and not spec.may_drop_budgets:
            raise ConfigError(
                f"training.{key} is set and nothing can be held against it:"
                f" {_lacks(cost, peak)}; give what is missing, or set {key} to null"
            )
        if value is not None and budget is not None and value > budget:
            raise ConfigError(
                f"training.{key} is {budget:g} and the plan needs {amount_words(key, value)}; raise"
                " it, or train fewer tokens"
            )


def amount_words(key: str, value: float) -> str:
    """Say what a budget of this name is spent on: ``0.011 hours (40 seconds)``, ``$0.0011``."""
    if key == "max_usd":
        return f"${value:.2f}" if value >= 1 else f"${value:.3g}"
    return f"{value:.4g} hours ({time_words(value)})"


def _lacks(cost: CostPlan, peak: float | None) -> str:
    if cost.predicted_hours is None and peak is None:
        return "the speed of this hardware is not known (calibrate: true measures it)"
    return "no price is configured for it"


def _prior_reason(gpu: GpuFacts | None, work: Work, peak: float | None, n_cards: int) -> str:
    if gpu is None:
        return "no estimate on a CPU: its peak is not known; calibrate: true measures its speed"
    if peak is None:
        return (
            f"no estimate: the {work.precision} peak of {gpu.name} is not known; calibrate: true"
            " measures its speed"
        )
    again = work.flops_hardware / work.flops_model
    recomputed = (
        f"; checkpointing computes {again - 1:.0%} more, which takes its time and is no model FLOP"
        if again > 1
        else ""
    )
    shared = f"; {n_cards} cards, taken to share the work perfectly" if n_cards > 1 else ""
    return (
        f"prior: {MFU_LOW:.0%} to {MFU_HIGH:.0%} of {gpu.name}'s dense {work.precision} peak,"
        f" uncalibrated{recomputed}; start-up, saves and evaluation not included, as nothing was"
        f" measured{shared}"
    )
