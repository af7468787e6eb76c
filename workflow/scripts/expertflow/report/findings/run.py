"""Findings on the run: lost time, the plan it missed, and what it had to do without."""

from collections.abc import Callable

from expertflow.core.records import Record
from expertflow.report import derive
from expertflow.report.findings.evidence import (
    Report,
    broken,
    finding,
    lasted,
    price,
    watched,
    why_rows_differ,
)
from expertflow.report.format import duration, hours, percent, size
from expertflow.report.profile import judged_time
from expertflow.report.records import Finding

MONITOR_LIMIT = 0.005


class LostTime(Record, frozen=True):
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


def lost_times(report: Report) -> list[Finding | None]:
    start = BROKEN_START if broken(report) else WHOLE_START
    return [_lost_time(report, rule) for rule in (*LOST_TIMES, *start)]


def _lost_time(report: Report, rule: LostTime) -> Finding | None:
    time = judged_time(report)
    lost_s, wall_s = sum(time[part] for part in rule.parts), time["wall_s"]
    if not lasted(report) or lost_s <= rule.limit * wall_s:
        return None
    return finding(
        rule.code,
        evidence=f"{rule.what} took {percent(lost_s / wall_s)} of wall time ({duration(lost_s)})",
        threshold=f"at most {percent(rule.limit)}",
        recommendation=rule.recommendation,
        worth=price(report, lost_s, f"all of the {duration(lost_s)}"),
    )


def plan_missed(report: Report) -> Finding | None:
    row = _row(report, "Wall time")
    low, high, actual = row["plan_low"], row["plan_high"], row["actual"]
    if None in (low, high) or not lasted(report) or low <= actual <= high:
        return None
    calibrated = report["plan"]["calibrated"]
    return finding(
        "plan-missed",
        severity="warning" if calibrated else "info",
        evidence=f"the run took {hours(actual)}, the plan said {hours(low)} to {hours(high)}",
        threshold="inside the plan's band",
        origin="measured by a calibration" if calibrated else "a prior, not calibrated",
        recommendation=(
            "see the bottleneck: something was different from the calibration"
            if calibrated
            else "calibrate on this hardware (a short run of the same plan); see plan.cost_reason"
        ),
        worth="the parts of wall time behind it are priced on their own",
    )


def memory_missed(report: Report) -> Finding | None:
    row = _row(report, "Peak device memory")
    if row["difference_fraction"] is None or row["difference_fraction"] <= 0:
        return None
    return finding(
        "memory-over-plan",
        severity="info",
        evidence=f"the allocator held {size(row['actual'])}, {percent(row['difference_fraction'])}"
        f" more than the {size(row['plan'])} that were predicted",
        threshold="at most what the plan predicts",
        origin="the prediction includes a reserve",
        recommendation="leave more room than the plan says when choosing a card for this model",
    )


def slow_tokeniser(report: Report) -> Finding | None:
    because = report["data"]["tokenizer_fallbacks"]
    if not because:
        return None
    return finding(
        "tokenizer-fallback",
        severity="info",
        evidence=f"some shards were tokenised by the slower engine: {because[0]}",
        threshold="none",
        origin="a fallback is said",
        recommendation="nothing, unless tokenising is what takes long: both engines' ids are equal",
        worth="tokenising is outside the wall time of training",
    )


def measured_peak(report: Report) -> Finding | None:
    gpu = report["training_report"]["hardware"]["gpu"]
    if gpu["peak_source"] != derive.MEASURED_PEAK:
        return None
    return finding(
        "measured-peak",
        severity="info",
        evidence=f"no source gives a peak for {gpu['name']}; MFU is over what one product reached",
        threshold="a published peak",
        origin="a fallback is said",
        recommendation="add the card to config/hardware/gpus.yaml, with a source; MFU then falls",
    )


def busy_monitor(report: Report) -> Finding | None:
    share = report["training_report"]["hardware"]["monitor_cpu_fraction"]
    if share is None or not watched(report) or share <= MONITOR_LIMIT:
        return None
    return finding(
        "monitor-overhead",
        severity="info",
        evidence=f"the monitor took {percent(share)} of one core",
        threshold=f"at most {percent(MONITOR_LIMIT)}",
        recommendation="raise collection_interval_seconds",
        worth="a core beside the trainer; what it cost in time was not measured",
    )


def lost_monitor(report: Report) -> Finding | None:
    hardware = report["training_report"]["hardware"]
    if hardware["samples"] > 0:
        return None
    return finding(
        "monitor-lost",
        severity="info",
        evidence="the monitor left no sample of this run",
        threshold="one at least",
        origin="a fallback is said",
        recommendation="run monitor_gpu.py alone to see what it says",
    )


def other_rows(report: Report) -> Finding | None:
    because = why_rows_differ(report)
    if because is None:
        return None
    return finding(
        "rows-not-compared",
        severity="info",
        evidence=because,
        threshold="every full epoch sees the packed rows once",
        origin="a check that could not be made is said",
        recommendation="none, if the run was made by hand",
    )


def false_claims(report: Report) -> list[Finding | None]:
    return [
        finding(
            "claim",
            severity="info",
            evidence=f"\u201c{claim['text']}\u201d: {claim['finding']}",
            threshold="a claim follows from its own numbers",
            origin="arithmetic",
            recommendation="go by the plan's own figures",
        )
        for claim in report["plan"]["claims"]
        if not claim["holds"]
    ]


def _row(report: Report, quantity: str) -> Report:
    rows: list[Report] = report["plan_against_actual"]
    return next(row for row in rows if row["quantity"] == quantity)


RULES: tuple[Callable[[Report], Finding | None], ...] = (
    plan_missed, memory_missed, slow_tokeniser, measured_peak, busy_monitor, lost_monitor,
    other_rows,
)  # fmt: skip
