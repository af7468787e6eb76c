"""What findings share: when there is enough evidence, what counters and times say, and a price."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from expertflow.report.derive import NO_PRICE
from expertflow.report.format import NBSP
from expertflow.report.measured import is_measured
from expertflow.report.profile import time_without_profile
from expertflow.report.records import Finding, Report, Severity

Findings = Iterator[Finding]

ORIGIN = "our judgment, not yet calibrated on runs"
FALLBACK = "fallbacks are reported"
MIN_STEPS = 20  # fewer steps say little about waiting: the first ones start workers
MIN_WALL_S = 60.0  # in a shorter run every fixed cost looks large
MIN_SAMPLES = 20  # readings of the monitor
NOT_TIMED = "its cost in time was not measured"
NO_LOSS = "it costs no time"
PRICED_ELSEWHERE = "the wall time behind it is priced separately"
# Our judgment, except for the first: DCGM's guidance calls streaming multiprocessors that are
# active 80 % of the time or more a necessary sign of good use.
SM_BUSY_PERCENT = 80.0
TENSOR_LOW_PERCENT = 25.0
KERNEL_BUSY_PERCENT = 90.0
POWER_LOW_FRACTION = 0.60


def make_finding(
    code: str,
    *,
    evidence: str,
    threshold: str,
    recommendation: str,
    severity: Severity = "warning",
    origin: str = ORIGIN,
    worth: str | tuple[float | None, str] = NO_LOSS,
) -> Finding:
    """Make a finding; ``worth`` is its price and how it was calculated, or why there is none."""
    worth_usd, worth_reason = (None, worth) if isinstance(worth, str) else worth
    return Finding(
        code=code,
        severity=severity,
        # report.json is searched with plain spaces; the page adds its own
        evidence=evidence.replace(NBSP, " "),
        threshold=threshold.replace(NBSP, " "),
        threshold_origin=origin,
        recommendation=recommendation,
        worth_usd=worth_usd,
        worth_reason=worth_reason,
    )


def price_time(report: Report, lost_s: float, what: str) -> tuple[float | None, str]:
    """Price measured lost time, the most that a fix can save; explain how."""
    rate = report.cost.usd_per_hour
    if not is_measured(rate):
        return None, NO_PRICE
    return rate * lost_s / 3600, f"{what}, at ${rate:g} an hour; the most that a fix can save"


def is_long_enough(report: Report) -> bool:
    return report.training_report.training.steps >= MIN_STEPS and report.time.wall_s >= MIN_WALL_S


def has_readings(report: Report) -> bool:
    return is_long_enough(report) and report.training_report.hardware.samples >= MIN_SAMPLES


def is_interrupted(report: Report) -> bool:
    """Return whether work was discarded: a kill or lack of memory led back to a checkpoint."""
    training = report.training_report.training
    return training.sessions > 1 or bool(training.memory_retries)


class Counters(NamedTuple):
    """Medians of the card's readings: what was so most of the time, pauses aside.

    In percent, power as a fraction of the limit. NaN, for which no comparison is true, if unknown.
    """

    tensor: float
    sm: float
    kernel: float
    power: float

    @property
    def is_memory_bound(self) -> bool:
        return self.tensor < TENSOR_LOW_PERCENT and self.sm > SM_BUSY_PERCENT

    @property
    def has_small_kernels(self) -> bool:
        """Whether some kernel always runs and the card still draws little power.

        If counters show busy multiprocessors, the kernels are not small, whatever the power.
        """
        # Cards before Hopper lack the counter of multiprocessors; then power must do.
        is_idle = self.kernel > KERNEL_BUSY_PERCENT and self.power < POWER_LOW_FRACTION
        return is_idle and not self.sm > SM_BUSY_PERCENT


def read_counters(report: Report) -> Counters:
    card = report.training_report.hardware
    read = (card.tensor_active_percent, card.sm_active_percent, card.any_kernel_percent)
    tensor, sm, kernel, power_w = (x.p50 if x else math.nan for x in (*read, card.power_w))
    return Counters(tensor, sm, kernel, power_w / (card.gpu.power_limit_w or math.nan))


def time_shares(report: Report) -> dict[str, float]:
    """Return the shares of wall time by use; empty for a run without time.

    The wait for a profile is left out.
    """
    time = time_without_profile(report)
    seconds = {
        "step": time.train_s,
        "data": time.data_wait_s + (time.h2d_s or 0.0),
        "checkpoint": time.checkpoint_s,
        "evaluation": time.eval_s,
        "start-up": time.startup_s,
    }
    # What no clock covers: work since the last checkpoint if a run was interrupted.
    tail = "lost-work" if is_interrupted(report) else "start-up"
    seconds[tail] = seconds.get(tail, 0.0) + time.other_s
    wall_s = sum(seconds.values())
    return {name: s / wall_s for name, s in seconds.items()} if wall_s > 0 else {}


def steps_per_epoch(report: Report) -> int:
    # The last step of an epoch takes the remaining rows.
    batch = report.training_parameters.global_batch_sequences
    return max(1, -(-report.data.sequences // batch))


def why_rows_differ(report: Report) -> str | None:
    """Return why the run's epochs are not passes over the packed rows; null if they are.

    A run by hand may have its own batch, or documents that are tokenized as they are needed.
    """
    training = report.training_report.training
    not_checked = "its tokens were not checked against packing.json"
    if training.on_the_fly:
        return (
            "the run tokenized its documents on the fly: its rows are not the packed ones;"
            f" {not_checked}"
        )
    epochs = training.steps / steps_per_epoch(report)
    # Equal, except for rounding of floats.
    if abs(epochs - training.epochs) <= 1e-6:
        return None
    return (
        f"{training.steps:,} steps are {training.epochs:.4g} epochs of this run and"
        f" {epochs:.4g} of the packed rows: it had its own settings; {not_checked}"
    )
