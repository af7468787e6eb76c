"""What every rule shares: when there is evidence enough, and how a finding is made."""

from typing import Any, Literal

from expertflow.report.derive import NO_PRICE
from expertflow.report.format import NBSP
from expertflow.report.records import Finding

Report = dict[str, Any]

ORIGIN = "our judgement, not yet calibrated on runs"
MIN_STEPS = 20  # fewer steps say little about waiting: the first ones start workers
MIN_WALL_S = 60.0  # in a shorter run every fixed cost looks large
MIN_SAMPLES = 20  # readings of the monitor
NOT_TIMED = "what it cost in time was not measured"
NO_LOSS = "no time is lost by it"


def lasted(report: Report) -> bool:
    """Tell whether the run was long enough to judge how its time was spent."""
    steps, wall_s = report["training_report"]["training"]["steps"], report["time"]["wall_s"]
    return bool(steps >= MIN_STEPS and wall_s >= MIN_WALL_S)


def watched(report: Report) -> bool:
    """Tell whether the monitor saw enough of a run that was long enough."""
    return lasted(report) and bool(report["training_report"]["hardware"]["samples"] >= MIN_SAMPLES)


def broken(report: Report) -> bool:
    """Tell whether work was thrown away: a kill or short memory led back to a checkpoint."""
    training = report["training_report"]["training"]
    return bool(training["sessions"] > 1 or training["memory_retries"])


def finding(
    code: str,
    *,
    evidence: str,
    threshold: str,
    recommendation: str,
    severity: Literal["info", "warning", "problem"] = "warning",
    origin: str = ORIGIN,
    worth: tuple[float | None, str] = (None, NOT_TIMED),
) -> Finding:
    """Make a finding; report.json is searched with plain spaces, the page ties its own."""
    return Finding(
        code=code,
        severity=severity,
        evidence=evidence.replace(NBSP, " "),
        threshold=threshold.replace(NBSP, " "),
        threshold_origin=origin,
        recommendation=recommendation,
        worth_usd=worth[0],
        worth_reason=worth[1],
    )


def price(report: Report, lost_s: float, what: str) -> tuple[float | None, str]:
    """Price time that was measured as lost, the most that a fix can save; say how."""
    rate = report["cost"]["usd_per_hour"]
    if rate is None:
        return None, NO_PRICE
    return rate * lost_s / 3600, f"{what}, at ${rate:g} an hour; the most that a fix can save"


def median(report: Report, name: str) -> float | None:
    """Give the median of a sampled quantity: what was so most of the time, pauses aside."""
    stats = report["training_report"]["hardware"][name]
    return None if stats is None else float(stats["p50"])
