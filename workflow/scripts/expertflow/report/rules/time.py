"""Rules over wall time: parts that should stay small, and work that was done twice."""

from expertflow.core.records import Record
from expertflow.plan.records import USABLE_FRACTION
from expertflow.report.finding import Report, broken, finding, lasted, price
from expertflow.report.format import duration, percent, size
from expertflow.report.profile import judged_time
from expertflow.report.records import Finding


class LostTime(Record, frozen=True, kw_only=True):
    """A part of wall time that should stay below a share of it."""

    code: str
    parts: tuple[str, ...]
    limit: float
    what: str
    recommendation: str


SHARED_START = "train several experts in one rental, so that they share the start-up"
LOST_TIMES = (
    LostTime(
        code="data-wait",
        parts=("data_wait_s",),
        limit=0.05,
        what="waiting for data",
        recommendation=(
            "stage the rows on a local disk (scratch), pack them before training, or compare 2, 4"
            " and 8 loader workers"
        ),
    ),
    LostTime(
        code="checkpoint-time",
        parts=("checkpoint_s",),
        limit=0.02,
        what="saving checkpoints",
        recommendation="save more rarely (save_every_minutes), or to a faster disk",
    ),
    LostTime(
        code="evaluation-time",
        parts=("eval_s",),
        limit=0.05,
        what="evaluation during training",
        recommendation="evaluate more rarely (eval_steps), or on fewer held-out documents",
    ),
    LostTime(
        code="start-up",
        parts=("startup_s", "other_s"),
        limit=0.10,
        what="start-up and other work outside the steps",
        recommendation=SHARED_START,
    ),
)
# Where a run was broken off, what no stamp covers is above all work that was thrown away.
BROKEN_TIMES = (
    *LOST_TIMES[:-1],
    LostTime(
        code="start-up",
        parts=("startup_s",),
        limit=0.10,
        what="start-up",
        recommendation=SHARED_START,
    ),
    LostTime(
        code="lost-work",
        parts=("other_s",),
        limit=0.05,
        what="work that was thrown away since the last checkpoint",
        recommendation="save more often (save_every_minutes)",
    ),
)


def lost_times(report: Report) -> list[Finding | None]:
    """Hold every part of wall time against its limit."""
    return [_lost_time(report, rule) for rule in (BROKEN_TIMES if broken(report) else LOST_TIMES)]


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


def recomputation(report: Report) -> Finding | None:
    """Speak up where activations were computed twice and would have fitted."""
    model = report["model"]
    total = report["training_report"]["hardware"]["gpu"]["memory_total_bytes"]
    without = report["plan"]["without_checkpointing_peak_bytes"]
    checkpointed = report["training_parameters"]["gradient_checkpointing"]
    if not checkpointed or None in (total, without) or not lasted(report):
        return None
    if without >= USABLE_FRACTION * total:
        return None
    again = 1 - model["flops_per_token_model"] / model["flops_per_token_hardware"]
    return finding(
        "recomputation",
        evidence=(
            f"activations were computed twice, {percent(again)} of the hardware's FLOPs; without"
            f" that a peak of at most {size(without)} of {size(total)} is predicted"
        ),
        threshold=f"keep them where the prediction is below {percent(USABLE_FRACTION)} of memory",
        recommendation="gradient_checkpointing: false",
        worth=price(report, recomputed_s(report), "the same share of the time of the steps"),
    )


def recomputed_s(report: Report) -> float:
    """Give the share of the steps' time in which activations were computed again."""
    model, train_s = report["model"], report["time"]["train_s"]
    return float((1 - model["flops_per_token_model"] / model["flops_per_token_hardware"]) * train_s)
