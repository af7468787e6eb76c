"""The report's ``time`` section: wall time, its parts, and where the split of a step comes from.

On a CPU the host's stamps time every part. A GPU runs behind the host: there the time of all steps
is split as the device's own events split the steps that were sampled.
"""

from typing import Any

from msgspec.structs import replace

from expertflow.core.records import Record, to_json
from expertflow.train.records import SampledSteps, TimeSpent, TrainingRecord

STAMPS, SAMPLED = "stamps", "sampled steps"
THROWN_AWAY = "work that was thrown away is not timed"


class Times(Record, frozen=True, kw_only=True):
    """Time spent, with the parts of a step where they can be told, and from what."""

    spent: TimeSpent
    split_source: str | None
    gpu_idle_source: str | None


def time_section(training: TrainingRecord) -> dict[str, Any]:
    """Give the times of a run as JSON values."""
    times = split(training)
    return {
        **to_json(times.spent),
        "split_source": times.split_source,
        "gpu_idle_source": times.gpu_idle_source,
    }


def split(training: TrainingRecord) -> Times:
    """Split the time of the steps; what cannot be told stays null."""
    time, sampled = training.time, training.sampled_steps
    if training.device == "cpu":
        source = None if time.forward_s is None else STAMPS
        return Times(spent=time, split_source=source, gpu_idle_source=None)
    if sampled is None or span_s(sampled) <= 0:
        return Times(spent=time, split_source=None, gpu_idle_source=None)
    spent = _by_shares(time, sampled)
    if threw_away(training):
        return Times(spent=spent, split_source=SAMPLED, gpu_idle_source=None)
    busy_s = training.n_steps * span_s(sampled) + time.eval_s
    spent = replace(spent, gpu_idle_s=max(0.0, time.wall_s - busy_s))
    source = (
        f"estimate: wall time less evaluation (taken as busy) and {training.n_steps:,} steps of"
        f" {span_s(sampled):.4g} s, the mean of {sampled.n_steps:,} sampled ones; gaps between"
        " kernels inside a step are not counted"
    )
    return Times(spent=spent, split_source=SAMPLED, gpu_idle_source=source)


def threw_away(training: TrainingRecord) -> bool:
    """Tell whether steps may have been done that a later session or a retry did again."""
    return training.n_sessions > 1 or bool(training.memory_retries)


def span_s(sampled: SampledSteps) -> float:
    """Give the mean seconds between the first and the last event of a step's parts, added up."""
    return sampled.h2d_s + sampled.forward_s + sampled.backward_s + sampled.optimizer_s


def _by_shares(time: TimeSpent, sampled: SampledSteps) -> TimeSpent:
    """Share out the seconds of the steps; copies leave ``train_s``, so that parts stay disjoint."""
    steps_s = time.train_s + (time.h2d_s or 0.0)
    share_s = steps_s / span_s(sampled)
    return replace(
        time,
        h2d_s=share_s * sampled.h2d_s,
        train_s=steps_s - share_s * sampled.h2d_s,
        forward_s=share_s * sampled.forward_s,
        backward_s=share_s * sampled.backward_s,
        optimizer_s=share_s * sampled.optimizer_s,
    )
