"""Findings on the run: the plan it missed, and what it had to do without."""

from expertflow.report import derive
from expertflow.report.findings import evidence as e
from expertflow.report.findings.evidence import Findings, make_finding
from expertflow.report.format import hours, percent, size
from expertflow.report.measured import is_measured
from expertflow.report.records import Report
from expertflow.report.run_records import PlanRow


def find_missed_plan(report: Report) -> Findings:
    row, time, calibrated = _row(report, "Wall time"), report.time, report.plan.calibrated
    low, high, actual = row.plan_low, row.plan_high, row.actual
    if not calibrated:
        # A prior covers only the steps: startup, saves and evaluation were not measured.
        actual = (time.train_s + time.data_wait_s + (time.h2d_s or 0.0)) / 3600
    if low is None or high is None or not is_measured(actual) or not e.is_long_enough(report):
        return
    training = report.training_report.training
    if training.steps < training.planned_steps:
        return  # patience ended it, and the plan is for all steps
    if not low <= actual <= high:
        yield make_finding(
            "plan-missed",
            severity="warning" if calibrated else "info",
            evidence=f"the {'run' if calibrated else 'steps'} took {hours(actual)}, the plan"
            f" predicted {hours(low)} to {hours(high)}",
            threshold="inside the plan's band",
            origin="measured by a calibration" if calibrated else "a prior, not calibrated",
            recommendation="check the discarded time: the run was resumed"
            if e.is_interrupted(report)
            else "check the bottleneck: something differed from the calibration"
            if calibrated
            else "calibrate on this hardware (a short run of the same plan); see plan.cost_reason",
            worth=e.PRICED_ELSEWHERE,
        )


def find_memory_over_plan(report: Report) -> Findings:
    row = _row(report, "Peak device memory")
    plan, actual, difference = row.plan, row.actual, row.difference_fraction
    # A plan without a prediction is also falsy.
    if plan and is_measured(actual) and difference and difference > 0:
        yield make_finding(
            "memory-over-plan",
            severity="info",
            evidence=f"the allocator held {size(actual)}, {percent(difference)}"
            f" more than the predicted {size(plan)}",
            threshold="at most what the plan predicts",
            origin="the prediction includes a reserve",
            recommendation="choose a card for this model with more room than the plan predicts",
        )


def find_fallbacks(report: Report) -> Findings:
    hardware = report.training_report.hardware
    if because := report.data.tokenizer_fallbacks:
        yield make_finding(
            "tokenizer-fallback",
            severity="info",
            evidence=f"some shards were tokenized by the slower engine: {because[0]}",
            threshold="none",
            origin=e.FALLBACK,
            recommendation="none, unless tokenizing takes long: both engines give the same ids",
            worth="tokenizing is not part of training's wall time",
        )
    if hardware.gpu.peak_source == derive.MEASURED_PEAK:
        name = hardware.gpu.name or "this card"
        yield make_finding(
            "measured-peak",
            severity="info",
            evidence=f"no source gives a peak for {name}; MFU is relative to a measured matmul",
            threshold="a published peak",
            origin=e.FALLBACK,
            recommendation="add the card to config/hardware/gpus.yaml, with a source; MFU will"
            " then be lower",
        )


def find_plain_route(report: Report) -> Findings:
    for fallback in report.training_report.training.fallbacks:
        yield make_finding(
            "plain-route",
            severity="warning",
            evidence=f"{fallback.part} was {fallback.used} instead of {fallback.planned} after"
            f" step {fallback.after_step}: {fallback.reason}",
            threshold="loss and gradients as on the plain route",
            origin=e.FALLBACK,
            recommendation="results are correct, only slower; report it with the versions of torch"
            " and driver, and try newer ones",
            worth=e.NOT_TIMED,
        )


def find_lost_monitor(report: Report) -> Findings:
    if report.training_report.hardware.samples <= 0:
        yield make_finding(
            "monitor-lost",
            severity="info",
            evidence="the monitor recorded no samples of this run",
            threshold="at least one",
            origin=e.FALLBACK,
            recommendation="run monitor_gpu.py alone to see its output",
        )


def find_other_rows(report: Report) -> Findings:
    if because := e.why_rows_differ(report):
        yield make_finding(
            "rows-not-compared",
            severity="info",
            evidence=because,
            threshold="every full epoch sees the packed rows once",
            origin="skipped checks are reported",
            recommendation="none, if the run was started by hand",
        )


def find_false_claims(report: Report) -> Findings:
    for claim in report.plan.claims:
        if not claim.holds:
            yield make_finding(
                "claim",
                severity="info",
                evidence=f"\u201c{claim.text}\u201d: {claim.finding}",
                threshold="a claim follows from its own numbers",
                origin="arithmetic",
                recommendation="use the plan's own figures",
            )


def _row(report: Report, quantity: str) -> PlanRow:
    return next(row for row in report.plan_against_actual if row.quantity == quantity)
