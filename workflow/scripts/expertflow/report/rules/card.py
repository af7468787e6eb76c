"""Rules over the card's counters. Temperatures are never judged: the driver says when it is hot."""

from expertflow.plan.records import USABLE_FRACTION
from expertflow.report.bottleneck import (
    KERNEL_BUSY_PERCENT,
    POWER_LOW_FRACTION,
    SM_BUSY_PERCENT,
    TENSOR_LOW_PERCENT,
    memory_bound,
    power_fraction,
    small_kernels,
    time_shares,
)
from expertflow.report.finding import NO_LOSS, Report, finding, lasted, median, watched
from expertflow.report.format import duration, percent, size
from expertflow.report.records import Finding

THERMAL_LIMIT = 0.01
BUSY_LIMIT_PERCENT = 60.0
SPILL_LIMIT = 0.01  # of the card's memory: less is the sampling of a peak
HOST_WORK = ("data", "checkpoint", "start-up")  # evaluation keeps the card busy
COUNTER_ORIGIN = "our judgement; 80 % is what DCGM's guidance calls necessary for good use"


def memory_bound_kernels(report: Report) -> Finding | None:
    """Find busy multiprocessors with idle tensor cores."""
    if not watched(report) or not memory_bound(report):
        return None
    tensor, sm = median(report, "tensor_active_percent"), median(report, "sm_active_percent")
    return finding(
        "memory-bound-kernels",
        evidence=f"multiprocessors were active {sm:.0f} % of the time, tensor cores {tensor:.0f} %",
        threshold=(
            f"tensor cores below {TENSOR_LOW_PERCENT:.0f} % while multiprocessors are above"
            f" {SM_BUSY_PERCENT:.0f} % (medians)"
        ),
        origin=COUNTER_ORIGIN,
        recommendation="fused norms and activations (torch_compile), or a larger micro-batch",
    )


def many_small_kernels(report: Report) -> Finding | None:
    """Find a card that always runs something and draws little power."""
    if not watched(report) or not small_kernels(report):
        return None
    kernel, power = median(report, "any_kernel_percent"), power_fraction(report)
    assert power is not None
    return finding(
        "small-kernels",
        evidence=(
            f"some kernel ran {kernel:.0f} % of the time, at {percent(power)} of the power limit"
        ),
        threshold=(
            f"above {KERNEL_BUSY_PERCENT:.0f} % busy, below {percent(POWER_LOW_FRACTION)} of the"
            " limit (medians)"
        ),
        recommendation="torch_compile: true, or a larger micro-batch: fewer and larger kernels",
    )


def idle_card(report: Report) -> Finding | None:
    """Find a card without work, and name the cause where times tell it."""
    stats = report["training_report"]["hardware"]["any_kernel_percent"]
    if stats is None or not watched(report) or stats["mean"] >= BUSY_LIMIT_PERCENT:
        return None
    shares = time_shares(report)
    cause = max(HOST_WORK, key=lambda name: shares[name])
    # Half of the idle time put down to one part of wall time is a cause; less is a guess.
    known = shares[cause] >= 0.5 * (1 - stats["mean"] / 100)
    why = "the times of the run do not tell why; inside the steps the host is the first suspect"
    if known:
        why = f"{cause} took {percent(shares[cause])} of wall time"
    return finding(
        "idle-card",
        evidence=f"some kernel ran {stats['mean']:.0f} % of the time; {why}",
        threshold=f"at least {BUSY_LIMIT_PERCENT:.0f} % (mean)",
        origin="the low end of the band that an earlier set-up worked by",
        recommendation=(
            f"see what this report says of {cause}"
            if known
            else "torch_compile: true, or a larger micro-batch"
        ),
        worth=(None, "the parts of wall time behind it are priced on their own"),
    )


def throttled(report: Report) -> Finding | None:
    """Find clocks that the driver held back for heat."""
    hardware = report["training_report"]["hardware"]
    causes, watched_s = hardware["throttle_s"], hardware["watched_s"]
    if causes is None or not watched_s or not watched(report):
        return None
    hot_s = max((s for name, s in causes.items() if "thermal" in name), default=0.0)
    if hot_s <= THERMAL_LIMIT * watched_s:
        return None
    return finding(
        "thermal-throttling",
        evidence=(
            f"the driver held the clocks back for heat {percent(hot_s / watched_s)} of the time"
            f" ({duration(hot_s)})"
        ),
        threshold=f"at most {percent(THERMAL_LIMIT)} of the time",
        recommendation="better cooling, or another host",
        worth=(None, "how much slower the steps were for it was not measured"),
    )


def spilled(report: Report) -> Finding | None:
    """Find device memory that lay in the host's."""
    hardware = report["training_report"]["hardware"]
    lost, total = hardware["memory_spilled_bytes"], hardware["gpu"]["memory_total_bytes"]
    if None in (lost, total) or not watched(report) or lost <= SPILL_LIMIT * total:
        return None
    return finding(
        "memory-spilled",
        evidence=f"{size(lost)} of device memory lay in the memory of the host",
        threshold=f"at most {percent(SPILL_LIMIT)} of the card's {size(total)}",
        recommendation="a smaller micro-batch at the same global batch, or gradient_checkpointing",
    )


def room_for_more(report: Report) -> Finding | None:
    """Find memory that would hold the next micro-batch, at the same global batch."""
    parameters, hardware = report["training_parameters"], report["training_report"]["hardware"]
    after, total = _next_peak(report), hardware["gpu"]["memory_total_bytes"]
    if after is None or not total or after >= USABLE_FRACTION * total or not lasted(report):
        return None
    micro, accumulation = parameters["batch_size"], parameters["gradient_accumulation_steps"]
    if accumulation % 2 or report["training_report"]["training"]["memory_retries"]:
        return None
    if parameters["gradient_checkpointing"]:
        return None  # room is better spent on keeping activations: another rule
    return finding(
        "memory-room",
        severity="info",
        evidence=(
            f"a micro-batch of {2 * micro} is predicted to need at most {size(after)} of"
            f" {size(total)}"
        ),
        threshold=f"the next micro-batch would take {percent(USABLE_FRACTION)} of memory or more",
        recommendation=(
            f"batch_size: {2 * micro}, gradient_accumulation_steps: {accumulation // 2}"
        ),
        worth=(None, NO_LOSS + " that was measured"),
    )


def _next_peak(report: Report) -> float | None:
    """Give the predicted peak at the next micro-batch, scaled up where this one took more."""
    plan, found = report["plan"], report["training_report"]["hardware"]
    after, planned = plan["next_micro_batch_peak_bytes"], plan["memory_peak_bytes"]
    if not after or not planned:
        return None
    actual = found["memory_peak_reserved_bytes"] or planned
    return float(after * max(1.0, actual / planned))
