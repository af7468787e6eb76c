"""Findings on parts of wall time that were lost to training."""

from collections.abc import Callable

from expertflow.report.findings import evidence as e
from expertflow.report.findings.evidence import Findings, make_finding
from expertflow.report.format import duration, percent
from expertflow.report.profile import time_without_profile
from expertflow.report.records import Report
from expertflow.staging.records import NO_SCRATCH

# A finding's code, the parts of wall time that should together stay below a share of it, and how to
# call them and reduce them.
LostTime = tuple[str, tuple[str, ...], float, str, Callable[[Report], str]]


def _advise_on_data(report: Report) -> str:
    if report.training_report.training.on_the_fly:
        return "pack the rows before training, not on the fly"
    # What training read, not what was planned, if its preflight recorded it.
    staged = report.staging.used.rows if report.staging.used else report.staging
    advice = "compare 2, 4 and 8 loader workers (loader, dataloader_num_workers)"
    if staged is not None and staged.reason == NO_SCRATCH:
        return f"stage the rows on a local disk (scratch: auto), or {advice}"
    return advice


def _advise_on_saves(report: Report) -> str:
    settings, training = report.training_parameters, report.training_report.training
    # The final save cannot be made less often.
    if training.saves <= 1:
        return "use a faster disk: only the final weights were saved"
    is_by_steps = settings.save_steps < settings.total_steps
    setting = "save_steps" if is_by_steps else "save_every_minutes"
    if settings.load_best_model_at_end:
        setting += "; load_best_model_at_end saves at every lower loss"
    return f"save less often ({setting}), or to a faster disk"


def _advise_on_evaluation(report: Report) -> str:
    fewer = "fewer held-out documents (data.eval_fraction)"
    is_rare = len(report.training_report.training.eval_points) <= 2
    return f"use {fewer}" if is_rare else f"evaluate less often (eval_steps), or on {fewer}"


def _advise_on_start(report: Report) -> str:
    advice = "every training run pays it once, however long it is"
    if report.training_parameters.torch_compile:
        return f"{advice}; torch_compile: false starts sooner and steps more slowly"
    return advice


LOST_TIMES: tuple[LostTime, ...] = (
    ("data-wait", ("data_wait_s",), 0.05, "waiting for data", _advise_on_data),
    ("checkpoint-time", ("checkpoint_s",), 0.02, "saving checkpoints", _advise_on_saves),
    ("evaluation-time", ("eval_s",), 0.05, "evaluation during training", _advise_on_evaluation),
)
WHOLE_START: tuple[LostTime, ...] = (
    (
        "start-up", ("startup_s", "other_s"), 0.10, "startup and other work outside the steps",
        _advise_on_start,
    ),
)  # fmt: skip
# If a run was interrupted, the time that no stamp covers is mostly discarded work.
BROKEN_START: tuple[LostTime, ...] = (
    ("start-up", ("startup_s",), 0.10, "startup", _advise_on_start),
    (
        "lost-work", ("other_s",), 0.05, "discarded work since the last checkpoint",
        lambda _: "save more often (save_every_minutes)",
    ),
)  # fmt: skip


def find_lost_time(report: Report) -> Findings:
    time = time_without_profile(report)
    start = BROKEN_START if e.is_interrupted(report) else WHOLE_START
    for code, parts, limit, what, recommend in (*LOST_TIMES, *start):
        lost_s, wall_s = sum(getattr(time, part) for part in parts), time.wall_s
        # In a run of seconds all fixed costs are large.
        if e.is_long_enough(report) and lost_s > limit * wall_s:
            yield make_finding(
                code,
                evidence=f"{what} took {percent(lost_s / wall_s)} of wall time"
                f" ({duration(lost_s)})",
                threshold=f"at most {percent(limit)}",
                recommendation=recommend(report),
                worth=e.price_time(report, lost_s, f"all of the {duration(lost_s)}"),
            )
