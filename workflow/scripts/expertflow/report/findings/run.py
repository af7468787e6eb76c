"""Findings on the run: lost time, the plan it missed, and what it had to do without."""

from typing import NamedTuple

from expertflow.report import derive
from expertflow.report.findings import evidence as e
from expertflow.report.findings.evidence import Findings, finding
from expertflow.report.format import duration, hours, percent, size
from expertflow.report.measured import is_measured
from expertflow.report.profile import time_without_profile
from expertflow.report.records import Report
from expertflow.report.run_records import PlanRow

MONITOR_LIMIT = 0.005


class LostTime(NamedTuple):
    """Parts of wall time that should together stay below a share of it."""

    code: str
    parts: tuple[str, ...]
    limit: float
    what: str
    recommendation: str


SHARED_START = "train several experts in one rental, so that they share the start-up"
LOST_TIMES = (
    LostTime(
        "data-wait", ("data_wait_s",), 0.05, "waiting for data",
        "stage the rows on a local disk (scratch), pack them before training, or compare 2, 4 and 8"
        " loader workers",
    ),
    LostTime(
        "checkpoint-time", ("checkpoint_s",), 0.02, "saving checkpoints",
        "save more rarely (save_every_minutes), or to a faster disk",
    ),
    LostTime(
        "evaluation-time", ("eval_s",), 0.05, "evaluation during training",
        "evaluate more rarely (eval_steps), or on fewer held-out documents",
    ),
)  # fmt: skip
WHOLE_START = (
    LostTime(
        "start-up", ("startup_s", "other_s"), 0.10, "start-up and other work outside the steps",
        SHARED_START,
    ),
)  # fmt: skip
# Where a run was broken off, what no stamp covers is above all work that was thrown away.
BROKEN_START = (
    LostTime("start-up", ("startup_s",), 0.10, "start-up", SHARED_START),
    LostTime(
        "lost-work", ("other_s",), 0.05, "work that was thrown away since the last checkpoint",
        "save more often (save_every_minutes)",
    ),
)  # fmt: skip


def lost_times(report: Report) -> Findings:
    time = time_without_profile(report)
    start = BROKEN_START if e.broken(report) else WHOLE_START
    for code, parts, limit, what, recommendation in (*LOST_TIMES, *start):
        lost_s, wall_s = sum(getattr(time, part) for part in parts), time.wall_s
        if e.lasted(report) and lost_s > limit * wall_s:
            yield finding(
                code,
                evidence=f"{what} took {percent(lost_s / wall_s)} of wall time"
                f" ({duration(lost_s)})",
                threshold=f"at most {percent(limit)}",
                recommendation=recommendation,
                worth=e.price(report, lost_s, f"all of the {duration(lost_s)}"),
            )


def plan_missed(report: Report) -> Findings:
    row = _row(report, "Wall time")
    low, high, actual = row.plan_low, row.plan_high, row.actual
    if low is None or high is None or not is_measured(actual) or not e.lasted(report):
        return
    if not low <= actual <= high:
        calibrated = report.plan.calibrated
        yield finding(
            "plan-missed",
            severity="warning" if calibrated else "info",
            evidence=f"the run took {hours(actual)}, the plan said {hours(low)} to {hours(high)}",
            threshold="inside the plan's band",
            origin="measured by a calibration" if calibrated else "a prior, not calibrated",
            recommendation="see the bottleneck: something was different from the calibration"
            if calibrated
            else "calibrate on this hardware (a short run of the same plan); see plan.cost_reason",
            worth=e.PRICED_ELSEWHERE,
        )


def memory_missed(report: Report) -> Findings:
    row = _row(report, "Peak device memory")
    plan, actual, difference = row.plan, row.actual, row.difference_fraction
    if plan and is_measured(actual) and difference and difference > 0:
        yield finding(
            "memory-over-plan",
            severity="info",
            evidence=f"the allocator held {size(actual)}, {percent(difference)}"
            f" more than the {size(plan)} that were predicted",
            threshold="at most what the plan predicts",
            origin="the prediction includes a reserve",
            recommendation="leave more room than the plan says when choosing a card for this model",
        )


def fallbacks(report: Report) -> Findings:
    hardware = report.training_report.hardware
    if because := report.data.tokenizer_fallbacks:
        yield finding(
            "tokenizer-fallback",
            severity="info",
            evidence=f"some shards were tokenized by the slower engine: {because[0]}",
            threshold="none",
            origin=e.FALLBACK,
            recommendation="nothing, unless tokenizing is what takes long: both engines' ids are"
            " equal",
            worth="tokenizing is outside the wall time of training",
        )
    if hardware.gpu.peak_source == derive.MEASURED_PEAK:
        name = hardware.gpu.name
        yield finding(
            "measured-peak",
            severity="info",
            evidence=f"no source gives a peak for {name}; MFU is over what one product reached",
            threshold="a published peak",
            origin=e.FALLBACK,
            recommendation="add the card to config/hardware/gpus.yaml, with a source; MFU then"
            " falls",
        )


def monitor(report: Report) -> Findings:
    hardware = report.training_report.hardware
    share = hardware.monitor_cpu_fraction
    if share and e.watched(report) and share > MONITOR_LIMIT:
        yield finding(
            "monitor-overhead",
            severity="info",
            evidence=f"the monitor took {percent(share)} of one core",
            threshold=f"at most {percent(MONITOR_LIMIT)}",
            recommendation="raise collection_interval_seconds",
            worth="a core beside the trainer; what it cost in time was not measured",
        )
    if hardware.samples <= 0:
        yield finding(
            "monitor-lost",
            severity="info",
            evidence="the monitor left no sample of this run",
            threshold="one at least",
            origin=e.FALLBACK,
            recommendation="run monitor_gpu.py alone to see what it says",
        )


def other_rows(report: Report) -> Findings:
    if because := e.why_rows_differ(report):
        yield finding(
            "rows-not-compared",
            severity="info",
            evidence=because,
            threshold="every full epoch sees the packed rows once",
            origin="a check that could not be made is said",
            recommendation="none, if the run was made by hand",
        )


def false_claims(report: Report) -> Findings:
    for claim in report.plan.claims:
        if not claim.holds:
            yield finding(
                "claim",
                severity="info",
                evidence=f"\u201c{claim.text}\u201d: {claim.finding}",
                threshold="a claim follows from its own numbers",
                origin="arithmetic",
                recommendation="go by the plan's own figures",
            )


def _row(report: Report, quantity: str) -> PlanRow:
    return next(row for row in report.plan_against_actual if row.quantity == quantity)


RULES = (plan_missed, memory_missed, fallbacks, monitor, other_rows, false_claims)
