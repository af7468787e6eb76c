"""Derive figures that no stage measures, or the reason for their absence; nothing is assumed."""

import math

from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.plan.cost import round_up_hours
from expertflow.plan.records import TrainPlan
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Measured, Missing, convert_value, fill, or_missing
from expertflow.report.run_records import Time
from expertflow.train.records import SampledSteps, TimeSpent, TrainingRecord

MEASURED_PEAK = "measured matmul on this card"
MEASURED_ON_CPU = "this machine's measured matmul speed"
NO_PRICE = "no price per hour is configured for this hardware"
JOULES_PER_KWH = 3.6e6
STEP_PARTS = ("h2d_s", "forward_s", "backward_s", "optimizer_s")
STAMPS, SAMPLED = "stamps", "sampled steps"
THROWN_AWAY = "discarded work is not timed"


class Peak(Record, frozen=True, kw_only=True):
    """Dense FLOP/s of the card, or the CPU, at the precision used."""

    flops_per_s: float
    source: str


def per_stepping_s(training: TrainingRecord, n: int) -> Measured[float]:
    """Divide a count by the seconds spent stepping or waiting, without saves and evaluation."""
    time = training.time
    seconds = time.train_s + time.data_wait_s + (time.h2d_s or 0.0)
    return n / seconds if seconds > 0 else Missing("no training step took measurable time")


def _other_cards(plan: TrainPlan, training: TrainingRecord) -> str:
    """Return the cards of all sessions that are not the planned one."""
    planned = () if plan.gpu is None else (plan.gpu.name, *plan.gpu.driver_names)
    # Each once, in the order in which sessions used them.
    names = dict.fromkeys((*training.gpu_names, training.gpu_name))
    return ", ".join(name for name in names if name is not None and name not in planned)


def peak(plan: TrainPlan, training: TrainingRecord) -> Measured[Peak]:
    """Return the card's peak: from the table if it is the planned card, else as measured."""
    table, measured = _peak_of_table(plan, training), training.measured_peak_flops_per_s
    # Measured on the last card: sessions on several kinds have no peak in common.
    if isinstance(table, Missing) and measured is not None and len(training.gpu_names) < 2:
        source = MEASURED_ON_CPU if training.device == "cpu" else MEASURED_PEAK
        return Peak(flops_per_s=measured, source=source)
    return table


def _peak_of_table(plan: TrainPlan, training: TrainingRecord) -> Measured[Peak]:
    if training.device == "cpu":
        return Missing("this run was on the CPU, and its preflight did not measure its speed")
    if training.gpu_name is None:
        return Missing("the driver did not report the card's name")
    if plan.gpu is None:
        return Missing(f"no source gives the peak FLOP/s of {training.gpu_name}")
    card, others = plan.gpu, _other_cards(plan, training)
    if others:
        return Missing(f"planned for {card.name}, but {others} did the work")
    # fp32 matmuls run as TF32 if the plan allows it; no table has the peak of plain fp32.
    name = {"bf16": "peak_bf16_flops_per_s", "fp16": "peak_fp16_flops_per_s"}.get(
        training.precision, "peak_tf32_flops_per_s" if plan.use_tf32 else ""
    )
    figure = getattr(card, name) if name else None
    if figure is None:
        return Missing(f"no source gives the {training.precision} peak of {card.name}")
    return Peak(flops_per_s=figure, source=card.sources.get(name) or card.source)


def memory_spilled(inputs: ReportInputs) -> Measured[float]:
    """Return the bytes that torch held beyond the card's highest reading.

    If the driver lets memory overflow to the host (WSL, Windows), the allocator counts it as the
    card's; the card's own reading, over all processes, does not.
    """
    reserved, used = inputs.training.peak_memory_reserved_bytes, inputs.monitor.memory_used_bytes
    if reserved is None:
        return Missing("this run was on the CPU: there is no device memory to spill")
    if used is None:
        return Missing("the monitor has no reading of the card's memory to compare with")
    # Usually negative: the reading includes the context and other processes.
    return max(0, reserved - round(used.max))


def utilization(inputs: ReportInputs, flops_per_token: float) -> Measured[float]:
    training = inputs.training
    top, speed = peak(inputs.plan, training), per_stepping_s(training, training.n_tokens)
    if isinstance(top, Missing):
        return top
    if isinstance(speed, Missing):
        return speed
    share = speed * flops_per_token / (top.flops_per_s * training.world_size)
    # No machine is faster than its peak: the measurement was too low, not the training fast.
    if share > 1 and top.source in (MEASURED_PEAK, MEASURED_ON_CPU):
        return Missing("something slowed this machine down while its peak was measured")
    return share


def usd_per_hour(inputs: ReportInputs) -> Measured[float]:
    """Return the plan's price; if it has none, the price given to the guard."""
    price, sessions = inputs.plan.cost.price_usd_per_hour, inputs.paid_sessions
    if price is None and sessions:
        return sessions[-1].usd_per_hour
    card, others = inputs.plan.gpu, _other_cards(inputs.plan, inputs.training)
    # A card of the user's own table may have another name in the driver.
    if price is not None and others and card is not None and card.driver_names:
        return Missing(f"the price is for {card.name}, but {others} did the work")
    return or_missing(price, NO_PRICE)


def cost_usd(inputs: ReportInputs, *, billed: bool = False) -> Measured[float]:
    """Price the wall time of training; ``billed`` rounds up to billing steps."""
    hours = inputs.training.time.wall_s / 3600
    if billed:
        hours = round_up_hours(hours, inputs.plan.cost.billing_minutes)
    return convert_value(usd_per_hour(inputs), lambda usd: usd * hours)


def usd_per_million_tokens(inputs: ReportInputs) -> Measured[float]:
    return convert_value(cost_usd(inputs), lambda usd: usd / inputs.training.n_tokens * 1e6)


def energy_kwh(inputs: ReportInputs) -> Measured[float]:
    """Return the energy of the card, or of all visible ones if several trained; not the host's."""
    monitor = inputs.monitor
    name = "energy_all_j" if inputs.training.world_size > 1 else "energy_j"
    energy_j: float | None = getattr(monitor, name)
    if energy_j is None:
        return Missing(monitor.unavailable.get(name, "the monitor did not record it"))
    return energy_j / JOULES_PER_KWH


def n_epochs_started(n_epochs: float) -> int:
    """Count epochs begun: 2.4 epochs are three; a hair over an integer is rounding error."""
    return max(1, math.ceil(n_epochs - 1e-6))


def split_time(training: TrainingRecord) -> Time:
    """Split the time of the steps; an unknown part has its reason.

    On a CPU, host timestamps time every part. A GPU runs behind the host, so the total is split in
    the proportions that device events measured on sampled steps.
    """
    time, sampled, reasons = training.time, training.sampled_steps, training.unavailable
    why = {part: why_untold(training, part) for part in (*STEP_PARTS, "gpu_idle_s")}
    # Without parts there is only the total, and each part has the reason.
    split: Measured[str] = SAMPLED
    if training.device == "cpu":
        split = STAMPS
    elif sampled is None or span_s(sampled) <= 0:
        split = Missing(reasons.get("sampled_steps", "no step was timed on the device"))
        why = dict.fromkeys(why, split.reason)
    # A later session or a retry may have repeated some steps.
    elif training.n_sessions > 1 or training.memory_retries:
        time, why["gpu_idle_s"] = _by_shares(time, sampled), THROWN_AWAY
    else:
        # Evaluation is assumed busy; gaps between kernels inside a step are not counted.
        busy_s = training.n_steps * span_s(sampled) + time.eval_s
        time = replace(_by_shares(time, sampled), gpu_idle_s=max(0.0, time.wall_s - busy_s))
    return fill(Time, time, why=why, split_source=split)


def why_untold(training: TrainingRecord, name: str) -> str:
    reasons = training.unavailable
    return reasons.get(name) or reasons.get(f"time.{name}") or "the trainer did not record it"


def span_s(sampled: SampledSteps) -> float:
    """Return the mean seconds of a sampled step, summed over its parts."""
    total_s: float = sum(getattr(sampled, part) for part in STEP_PARTS)
    return total_s


def _by_shares(time: TimeSpent, sampled: SampledSteps) -> TimeSpent:
    # The host's stamps may split these two wrongly; their sum is right.
    steps_s = time.train_s + (time.h2d_s or 0.0)
    # Sampled steps of 10 ms, 1 of them the copy -> a tenth of all seconds of steps is copies.
    share_s = steps_s / span_s(sampled)
    parts = {part: share_s * getattr(sampled, part) for part in STEP_PARTS}
    return replace(time, **parts, train_s=steps_s - parts["h2d_s"])
