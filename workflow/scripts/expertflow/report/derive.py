"""Figures that no stage measures but that follow from what was measured.

Each is a number or null with a reason. Nothing is assumed: an unknown peak gives no utilisation,
and an unknown price no cost.
"""

import math

from expertflow.core.records import Record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost import billed_hours
from expertflow.plan.records import TrainPlan
from expertflow.report.inputs import ReportInputs
from expertflow.train.records import TimeSpent, TrainingRecord

MEASURED_PEAK = "measured matmul on this card"
JOULES_PER_KWH = 3.6e6


class Figure(Record, frozen=True, kw_only=True):
    """A derived number; exactly one of the two is null."""

    value: float | None = None
    reason: str | None = None


class Peak(Record, frozen=True, kw_only=True):
    """What the card could do at the precision that was used, in dense FLOP/s."""

    flops_per_s: float | None = None
    source: str | None = None
    reason: str | None = None


def on_cpu(training: TrainingRecord) -> bool:
    """Tell whether the run used no GPU."""
    return training.device == "cpu"


def stepping_s(time: TimeSpent) -> float:
    """Sum the seconds in which training advanced or waited for data: no saves, no evaluation."""
    return time.train_s + time.data_wait_s + (time.h2d_s or 0.0)


def parts_s(time: TimeSpent) -> float:
    """Sum the disjoint parts of wall time. They should give ``wall_s`` within 1 %."""
    return stepping_s(time) + time.startup_s + time.checkpoint_s + time.eval_s + time.other_s


def tokens_per_s(training: TrainingRecord) -> Figure:
    """Give useful tokens (no padding) a second of stepping, over all devices."""
    return per_stepping_s(training, training.n_tokens)


def per_stepping_s(training: TrainingRecord, n: int) -> Figure:
    """Divide a count of the whole run by the seconds in which it was stepping."""
    seconds = stepping_s(training.time)
    if seconds <= 0:
        return Figure(reason="no training step took measurable time")
    return Figure(value=n / seconds)


def facts_of_card(plan: TrainPlan, training: TrainingRecord) -> GpuFacts | None:
    """Give the planned card's facts, only if that card did the work."""
    card = plan.gpu
    if card is None or training.gpu_name not in {card.name, *card.driver_names}:
        return None
    return card


def peak(plan: TrainPlan, training: TrainingRecord) -> Peak:
    """Give the peak of the card that ran: the table's, else what a product was measured to reach.

    The table counts only if the card that ran is the one that the plan describes.
    """
    table = _peak_of_table(plan, training)
    measured = training.measured_peak_flops_per_s
    if table.flops_per_s is None and not on_cpu(training) and measured is not None:
        return Peak(flops_per_s=measured, source=MEASURED_PEAK)
    return table


def _peak_of_table(plan: TrainPlan, training: TrainingRecord) -> Peak:
    if on_cpu(training):
        return Peak(reason="this run was on the CPU, whose peak FLOP/s no source gives")
    if training.gpu_name is None:
        return Peak(reason="the driver did not tell the card's name")
    if plan.gpu is None:
        return Peak(reason=f"no source gives the peak FLOP/s of {training.gpu_name}")
    card = facts_of_card(plan, training)
    if card is None:
        return Peak(reason=f"planned for {plan.gpu.name}, but {training.gpu_name} did the work")
    name = {"bf16": "peak_bf16_flops_per_s", "fp16": "peak_fp16_flops_per_s"}.get(
        training.precision, "peak_tf32_flops_per_s" if plan.use_tf32 else ""
    )
    figure = getattr(card, name) if name else None
    if figure is None:
        return Peak(reason=f"no source gives the {training.precision} peak of {card.name}")
    return Peak(flops_per_s=figure, source=source_of(card, name))


def source_of(card: GpuFacts, figure: str) -> str:
    """Give the source of one figure of a card, or that of its row."""
    return card.sources.get(figure) or card.source


def memory_spilled(inputs: ReportInputs) -> Figure:
    """Give what torch held beyond anything the card ever held, in bytes.

    Where the driver lets memory overflow to the host (WSL, Windows), the allocator counts it as
    the card's; the card's own reading, of all processes together, does not.
    """
    training, used = inputs.training, inputs.monitor.memory_used_bytes
    if on_cpu(training):
        return Figure(reason="this run was on the CPU: there is no device memory to spill")
    if training.peak_memory_reserved_bytes is None:
        return Figure(reason="the trainer did not record the memory that its allocator held")
    if used is None:
        return Figure(reason="the monitor has no reading of the card's memory to compare with")
    return Figure(value=max(0, training.peak_memory_reserved_bytes - round(used.max)))


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
    """Price the wall time of training; storage as in the rate, no rounding to billing steps."""
    rate = inputs.plan.cost.price_usd_per_hour
    if rate is None:
        return Figure(reason="no price per hour is configured for this hardware")
    return Figure(value=rate * inputs.training.time.wall_s / 3600)


def billed_usd(inputs: ReportInputs) -> Figure:
    """Price the wall time of training, rounded up to whole billing steps as in the plan."""
    cost = inputs.plan.cost
    if cost.price_usd_per_hour is None:
        return cost_usd(inputs)
    hours = billed_hours(inputs.training.time.wall_s / 3600, cost.billing_minutes)
    return Figure(value=cost.price_usd_per_hour * hours)


def usd_per_million(inputs: ReportInputs, n_tokens: int) -> Figure:
    """Price a million of the run's tokens, start-up, saves and evaluation included."""
    usd = cost_usd(inputs)
    if usd.value is None:
        return usd
    if n_tokens == 0:
        return Figure(reason="no token was trained")
    return Figure(value=usd.value / n_tokens * 1e6)


def energy_kwh(inputs: ReportInputs) -> Figure:
    """Give the energy of the cards that trained, in kilowatt-hours; of several, all visible ones.

    The host's own energy has no counter here.
    """
    monitor = inputs.monitor
    name = "energy_all_j" if inputs.training.world_size > 1 else "energy_j"
    energy_j = getattr(monitor, name)
    if energy_j is None:
        return Figure(reason=monitor.unavailable.get(name, "the monitor did not record it"))
    return Figure(value=energy_j / JOULES_PER_KWH)


def n_epochs_started(n_epochs: float) -> int:
    """Count epochs begun: 2.4 epochs are three. A hair over a whole number is rounding."""
    return max(1, math.ceil(n_epochs - 1e-6))
