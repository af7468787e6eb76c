"""Name what held a run back: the largest part of its time, and in a step what counters say."""

from typing import Any

from expertflow.report.finding import MIN_SAMPLES, broken, lasted, median
from expertflow.report.format import NBSP, percent
from expertflow.report.profile import judged_time

Report = dict[str, Any]

# Our judgement, but for the first: DCGM's guidance calls streaming multiprocessors that are active
# 80 % of the time or more a necessary sign of good use.
SM_BUSY_PERCENT = 80.0
TENSOR_LOW_PERCENT = 25.0
TENSOR_HIGH_PERCENT = 50.0
MFU_HIGH = 0.40  # the best published bf16 runs of 1-8B dense models reach 46 to 50 %
KERNEL_BUSY_PERCENT = 90.0
POWER_LOW_FRACTION = 0.60
SURE_FRACTION, VERY_SURE_FRACTION = 0.5, 0.7


def bottleneck(report: Report) -> dict[str, Any]:
    """Name the largest part of wall time, with its evidence.

    Where that is the step itself, the card's counters say what limits it: arithmetic, memory, or
    the launching of small kernels. Without counters the answer stays ``step``.
    """
    shares = time_shares(report)
    if not shares:
        return {"class": "unknown", "confidence": "low", "evidence": []}
    largest = max(shares, key=lambda name: shares[name])
    evidence = [f"{name}: {percent(share)}" for name, share in shares.items() if share > 0]
    counted: str | None = None
    if largest == "step":
        counted, counters = _inside_step(report)
        evidence += counters
    sure = shares[largest] >= SURE_FRACTION and lasted(report)
    very = counted is not None and shares[largest] >= VERY_SURE_FRACTION
    return {
        "class": counted or largest,
        "confidence": "high" if sure and very else "medium" if sure else "low",
        "evidence": [line.replace(NBSP, " ") for line in evidence],
    }


def time_shares(report: Report) -> dict[str, float]:
    """Give the shares of wall time by what they are spent on; empty for a run without time.

    The wait for a profile is left out.
    """
    time = judged_time(report)
    tail = "lost-work" if broken(report) else "start-up"
    seconds = {
        "step": time["train_s"],
        "data": time["data_wait_s"] + (time["h2d_s"] or 0.0),
        "checkpoint": time["checkpoint_s"],
        "evaluation": time["eval_s"],
        "start-up": time["startup_s"],
    }
    seconds[tail] = seconds.get(tail, 0.0) + time["other_s"]
    wall_s = sum(seconds.values())
    return {name: s / wall_s for name, s in seconds.items()} if wall_s > 0 else {}


def _inside_step(report: Report) -> tuple[str | None, list[str]]:
    """Read the counters: what limits a step, null where they are missing or decide nothing."""
    hardware = report["training_report"]["hardware"]
    if hardware["samples"] < MIN_SAMPLES:
        return None, []
    tensor, sm = median(report, "tensor_active_percent"), median(report, "sm_active_percent")
    kernel, power = median(report, "any_kernel_percent"), power_fraction(report)
    mfu = report["throughput"]["mfu_fraction"]
    evidence = [
        *([] if tensor is None else [f"tensor cores active: {tensor:.0f} % (median)"]),
        *([] if sm is None else [f"multiprocessors active: {sm:.0f} % (median)"]),
        *([] if kernel is None else [f"any kernel running: {kernel:.0f} % (median)"]),
        *([] if power is None else [f"power: {percent(power)} of the limit (median)"]),
        *([] if mfu is None else [f"MFU: {percent(mfu)}"]),
    ]
    if memory_bound(report):
        return "memory-bound kernels", evidence
    if small_kernels(report):
        return "small kernels", evidence
    arithmetic = tensor >= TENSOR_HIGH_PERCENT if tensor is not None else (mfu or 0.0) >= MFU_HIGH
    return ("compute" if arithmetic else None), evidence


def memory_bound(report: Report) -> bool:
    """Tell whether multiprocessors are busy while tensor cores are not."""
    tensor, sm = median(report, "tensor_active_percent"), median(report, "sm_active_percent")
    return (
        tensor is not None
        and sm is not None
        and tensor < TENSOR_LOW_PERCENT
        and sm > SM_BUSY_PERCENT
    )


def small_kernels(report: Report) -> bool:
    """Tell whether some kernel always runs and the card still draws little power.

    Where counters show busy multiprocessors the kernels are not small, whatever the power.
    """
    kernel, power = median(report, "any_kernel_percent"), power_fraction(report)
    if (
        kernel is None
        or power is None
        or (median(report, "sm_active_percent") or 0) > SM_BUSY_PERCENT
    ):
        return False
    return kernel > KERNEL_BUSY_PERCENT and power < POWER_LOW_FRACTION


def power_fraction(report: Report) -> float | None:
    """Give the median power as a share of the limit in force."""
    power, limit = median(report, "power_w"), report["training_report"]["hardware"]["gpu"]
    limit_w = limit["power_limit_w"]
    return None if power is None or not limit_w else power / limit_w
