"""Rules over what was said before the run: the plan's own band, and claims of others."""

from expertflow.report.finding import NO_LOSS, Report, finding, lasted
from expertflow.report.format import hours, percent, size
from expertflow.report.records import Finding


def plan_missed(report: Report) -> Finding | None:
    """Find a run that took less or more time than the plan's band allows."""
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
        worth=(None, "the parts of wall time behind it are priced on their own"),
    )


def memory_missed(report: Report) -> Finding | None:
    """Find a run that held more memory than the plan predicted at most."""
    row = _row(report, "Peak device memory")
    if row["difference_fraction"] is None or row["difference_fraction"] <= 0:
        return None
    return finding(
        "memory-over-plan",
        severity="info",
        evidence=(
            f"the allocator held {size(row['actual'])}, {percent(row['difference_fraction'])} more"
            f" than the {size(row['plan'])} that were predicted"
        ),
        threshold="at most what the plan predicts",
        origin="the prediction includes a reserve",
        recommendation="leave more room than the plan says when choosing a card for this model",
        worth=(None, NO_LOSS),
    )


def false_claims(report: Report) -> list[Finding | None]:
    """Repeat the claims that do not follow from their own numbers."""
    return [
        finding(
            "claim",
            severity="info",
            evidence=f"\u201c{claim['text']}\u201d: {claim['finding']}",
            threshold="a claim follows from its own numbers",
            origin="arithmetic",
            recommendation="go by the plan's own figures",
            worth=(None, NO_LOSS),
        )
        for claim in report["plan"]["claims"]
        if not claim["holds"]
    ]


def _row(report: Report, quantity: str) -> Report:
    rows: list[Report] = report["plan_against_actual"]
    return next(row for row in rows if row["quantity"] == quantity)
