"""Figures that no stage measures but that follow from what was measured.

Each is a number or null with a reason. Nothing is assumed: an unknown peak gives no utilisation,
and an unknown price no cost.
"""

import math
from dataclasses import dataclass

from expertflow.evaluate.records import TaskScore
from expertflow.plan.records import TrainPlan
from expertflow.report.inputs import ReportInputs
from expertflow.train.records import TimeSpent, TrainingRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A derived number; exactly one of the two is null."""

    value: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What the card could do at the precision that was used, in dense FLOP/s."""

    flops_per_s: float | None = None
    source: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """After minus before of a fraction, with a 95 % interval."""

    value_fraction: float | None
    ci95: tuple[float, float] | None


def stepping_s(time: TimeSpent) -> float:
    """Sum the seconds in which training advanced or waited for data: no saves, no evaluation."""
    return time.train_s + time.data_wait_s + (time.h2d_s or 0.0)


def parts_s(time: TimeSpent) -> float:
    """Sum the disjoint parts of wall time. They should give ``wall_s`` within 1 %."""
    return stepping_s(time) + time.startup_s + time.checkpoint_s + time.eval_s + time.other_s


def tokens_per_s(training: TrainingRecord) -> Figure:
    """Give useful tokens (no padding) a second of stepping, over all devices."""
    seconds = stepping_s(training.time)
    if seconds <= 0:
        return Figure(reason="no training step took measurable time")
    return Figure(value=training.n_tokens / seconds)


def peak(plan: TrainPlan, training: TrainingRecord) -> Peak:
    """Look up the card's peak, only if the card that ran is the one that the plan describes."""
    if training.gpu_name is None:
        return Peak(reason="this run was on the CPU, whose peak FLOP/s no source gives")
    if plan.gpu is None:
        return Peak(reason=f"no source gives the peak FLOP/s of {training.gpu_name}")
    if training.gpu_name not in {plan.gpu.name, *plan.gpu.driver_names}:
        return Peak(reason=f"planned for {plan.gpu.name}, but {training.gpu_name} did the work")
    figure = {
        "bf16": plan.gpu.peak_bf16_flops_per_s,
        "fp16": plan.gpu.peak_fp16_flops_per_s,
        "fp32": plan.gpu.peak_tf32_flops_per_s if plan.use_tf32 else None,
    }.get(training.precision)
    if figure is None:
        return Peak(reason=f"no source gives the {training.precision} peak of {plan.gpu.name}")
    return Peak(flops_per_s=figure, source=plan.gpu.source)


def utilisation(inputs: ReportInputs, flops_per_token: float) -> Figure:
    """Divide the FLOP/s that useful tokens needed by the peak of all devices."""
    top, speed = peak(inputs.plan, inputs.training), tokens_per_s(inputs.training)
    if top.flops_per_s is None:
        return Figure(reason=top.reason)
    if speed.value is None:
        return Figure(reason=speed.reason)
    peak_flops_per_s = top.flops_per_s * inputs.training.world_size
    return Figure(value=speed.value * flops_per_token / peak_flops_per_s)


def goodput(time: TimeSpent) -> Figure:
    """Give the share of wall time in forward, backward and optimiser."""
    if time.wall_s <= 0:
        return Figure(reason="the run took no measurable time")
    return Figure(value=time.train_s / time.wall_s)


def cost_usd(inputs: ReportInputs) -> Figure:
    """Price the wall time of training. Billing steps and storage are left out."""
    rate = inputs.plan.cost.price_usd_per_hour
    if rate is None:
        return Figure(reason="no price per hour is configured for this hardware")
    return Figure(value=rate * inputs.training.time.wall_s / 3600)


def cost_usd_per_million_tokens(inputs: ReportInputs) -> Figure:
    """Price a million useful tokens, start-up, saves and evaluation included."""
    usd = cost_usd(inputs)
    if usd.value is None:
        return usd
    if inputs.training.n_tokens == 0:
        return Figure(reason="no token was trained")
    return Figure(value=usd.value / inputs.training.n_tokens * 1e6)


def score_difference(before: TaskScore | None, after: TaskScore | None) -> Difference:
    """Subtract two proportions, with Newcombe's interval from their two Wilson intervals.

    The sides are treated as independent. They answer the same questions, so the true interval is
    narrower wherever they agree: this one errs on the side of doubt.

    Source: R. G. Newcombe, Statistics in Medicine 17 (1998) 873-890, method 10.
    """
    if before is None or after is None:
        return Difference(value_fraction=None, ci95=None)
    p, q = before.value_fraction, after.value_fraction
    if p is None or q is None:
        return Difference(value_fraction=None, ci95=None)
    if before.ci95 is None or after.ci95 is None:
        return Difference(value_fraction=q - p, ci95=None)
    low = q - p - math.hypot(q - after.ci95[0], before.ci95[1] - p)
    high = q - p + math.hypot(after.ci95[1] - q, p - before.ci95[0])
    return Difference(value_fraction=q - p, ci95=(low, high))


def n_epochs_started(n_epochs: float) -> int:
    """Count epochs begun: 2.4 epochs are three. A hair over a whole number is rounding."""
    return max(1, math.ceil(n_epochs - 1e-6))
