"""Name what held a run back: the largest part of its time, and in a step what counters say."""

from typing import Any

from expertflow.report.findings.evidence import (
    MIN_SAMPLES,
    lasted,
    median,
    memory_bound,
    power_fraction,
    small_kernels,
    time_shares,
)
from expertflow.report.format import NBSP, percent

Report = dict[str, Any]

TENSOR_HIGH_PERCENT = 50.0
MFU_HIGH = 0.40  # the best published bf16 runs of 1-8B dense models reach 46 to 50 %
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


def _inside_step(report: Report) -> tuple[str | None, list[str]]:
    """Return what limits a step, null where counters are missing or decide nothing."""
    if report["training_report"]["hardware"]["samples"] < MIN_SAMPLES:
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
