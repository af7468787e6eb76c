"""Findings on parts of wall time that were lost for training."""

from typing import NamedTuple

from expertflow.report.findings import evidence as e
from expertflow.report.findings.evidence import Findings, make_finding
from expertflow.report.format import duration, percent
from expertflow.report.profile import time_without_profile
from expertflow.report.records import Report


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


def find_lost_time(report: Report) -> Findings:
    time = time_without_profile(report)
    start = BROKEN_START if e.is_interrupted(report) else WHOLE_START
    for code, parts, limit, what, recommendation in (*LOST_TIMES, *start):
        lost_s, wall_s = sum(getattr(time, part) for part in parts), time.wall_s
        if e.is_long_enough(report) and lost_s > limit * wall_s:
            yield make_finding(
                code,
                evidence=f"{what} took {percent(lost_s / wall_s)} of wall time"
                f" ({duration(lost_s)})",
                threshold=f"at most {percent(limit)}",
                recommendation=recommendation,
                worth=e.price_time(report, lost_s, f"all of the {duration(lost_s)}"),
            )
