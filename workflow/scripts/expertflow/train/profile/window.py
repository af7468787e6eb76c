"""Choose the steps that a profiler watches."""

from collections.abc import Iterable

from expertflow.core.records import Record
from expertflow.plan.records import TrainPlan
from expertflow.train.timing import is_sampled

# Steps of a session after which all is compiled, and memory is laid out.
N_WARM = 10
# A micro-batch of a large model is some ten thousand events, kilobytes each until they are read.
MAX_MICRO_BATCHES = 16


class Window(Record, frozen=True, kw_only=True):
    """Steps to watch, counted from 0, and those just before them to compare their time with."""

    neighbours: range
    steps: range


def choose_window(plan: TrainPlan, first: int) -> Window | None:
    """Choose the steps to watch in a session that begins at step ``first``; null: it is too short.

    They follow each other. Watched are the first ones after ``N_WARM`` steps of the session, or
    earlier where it is shorter, among which none is timed on the device for the report, and between
    which nothing is saved or evaluated; else such as are not timed; else the first ones. The first
    step of a session, which compiles, is never among them.
    """
    n_left = plan.n_steps - first
    n_steps = min(_n_allowed(plan), n_left - 1)
    if n_steps < 1:
        return None
    earliest, last = first + min(N_WARM, n_left - n_steps), plan.n_steps - n_steps
    starts = [*range(earliest, last + 1), *range(earliest - 1, first, -1)]
    quiet = (start for start in starts if _is_quiet(plan, range(start, start + n_steps)))
    plain = (start for start in starts if not _any_sampled(range(start, start + n_steps)))
    start = next(quiet, next(plain, earliest))
    return Window(
        neighbours=range(max(first + 1, start - n_steps), start),
        steps=range(start, start + n_steps),
    )


def cut_short(plan: TrainPlan) -> tuple[str, ...]:
    """Say that fewer steps are watched than were asked for, if so, and why."""
    n_allowed = _n_allowed(plan)
    if n_allowed == plan.profile_steps:
        return ()
    return (
        f"at most {n_allowed} of the {plan.profile_steps} steps asked for were to be watched: of"
        f" {plan.gradient_accumulation_steps} micro-batches each, and a profile of more than"
        f" {MAX_MICRO_BATCHES} in all may not fit into memory",
    )


def _n_allowed(plan: TrainPlan) -> int:
    return min(plan.profile_steps, max(1, MAX_MICRO_BATCHES // plan.gradient_accumulation_steps))


def _any_sampled(steps: Iterable[int]) -> bool:
    return any(is_sampled(step) for step in steps)


def _is_quiet(plan: TrainPlan, steps: range) -> bool:
    due = (step % every == 0 for step in steps[1:] for every in (plan.eval_steps, plan.save_steps))
    return not _any_sampled(steps) and not any(due)
