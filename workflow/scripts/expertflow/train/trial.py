"""Time some steps of a plan in this process with the training loop; keep nothing.

Warm-up steps compile, fill caches and settle the allocator. The clock then starts with an idle
device and runs until the last timed step is done.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from expertflow.core.errors import Interrupted
from expertflow.core.files import remove
from expertflow.core.records import Record, fill_record, read_record
from expertflow.plan.records import TrainPlan
from expertflow.train import loop, memory, processes, start, step_hooks
from expertflow.train.device import configure_allocator
from expertflow.train.feed.loader import load_batches
from expertflow.train.model.weights import Diverged
from expertflow.train.records import ModelRecord, TrialResult
from expertflow.train.run import TrainingRun, TrainInputs, one_line, stop_on_signals
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.timing import mark_time, seconds_between

if TYPE_CHECKING:
    # It imports packages that a trial on packed rows does not need, as in a peer's environment.
    from expertflow.train.feed.on_the_fly import Documents

# A trial that is too slow is abandoned after this many timed steps.
N_JUDGED = 3
# Steps by which a GPU may lag behind the host.
AHEAD = 4
COUNTS = ("n_tokens", "n_target_tokens", "n_padding_tokens")


class Trial(Record, frozen=True, kw_only=True):
    """A plan of one process with model and rows, and how long to run it.

    ``scratch`` is created and removed. Warm-up ends early after a step, not the first, that takes
    over ``long_step_s``; the timed part after the step that reaches ``max_timed_s``. A trial below
    ``least_tokens_per_s`` is abandoned. ``with_save``: a final checkpoint is taken and timed.
    """

    plan: TrainPlan
    model: Path
    rows: Path
    scratch: Path
    n_warmup_steps: int
    n_timed_steps: int
    max_timed_s: float = math.inf
    long_step_s: float = math.inf
    least_tokens_per_s: float | None = None
    documents: "Documents | None" = None
    with_save: bool = False


def run_trial(trial: Trial) -> TrialResult:
    """Run a trial here; running out of memory or diverging is a result.

    Run only one per process: kernels, compiled code and memory peaks persist. Raises TrainingError
    if the plan cannot run at all, e.g. if a kernel is missing.
    """
    n_steps = max(1, trial.n_warmup_steps) + trial.n_timed_steps
    plan = replace(
        trial.plan,
        world_size=1,
        n_steps=max(n_steps, trial.plan.n_steps),
        report_to="none",
        may_halve_micro_batch=False,
    )
    if plan.gpu is not None:
        configure_allocator()
    began_s = time.perf_counter()
    try:
        with _assembled(trial, plan) as run:
            return _timed(trial, run, began_s)
    except (memory.OutOfMemory, torch.OutOfMemoryError) as error:
        return TrialResult(outcome="out of memory", problem=one_line(error))
    except Diverged as error:
        return TrialResult(outcome="failed", problem=one_line(error))


@contextmanager
def _assembled(trial: Trial, plan: TrainPlan) -> Iterator[TrainingRun]:
    state = trial.scratch
    with stop_on_signals() as stop:
        try:
            remove(state)
            state.mkdir(parents=True)
            model = read_record(ModelRecord, trial.model)
            inputs = fill_record(TrainInputs, trial, plan=plan, model=model, state=state)
            with Saver(state, keep=1) as saver:
                group = processes.start_processes(plan)
                yield start.assemble_run(
                    inputs, processes=group, saver=saver, stop=stop, directory=None
                )
        finally:
            remove(state)


def _timed(trial: Trial, run: TrainingRun, began_s: float) -> TrialResult:
    cuda = run.device.type == "cuda"
    run.loss.train()
    start.try_batches(run)
    run.clock.book_startup()
    run.fetched_at_s = time.perf_counter()
    feed = load_batches(run.feed, 0, plan=run.plan, device=run.device, clock=run.clock)
    with feed as batches:

        def step() -> None:
            run.pending.append(loop.train_step(run, batches))
            if run.stop():
                raise Interrupted(f"stopped after step {run.progress.step} of a trial")

        startup_s = time.perf_counter() - began_s
        _warm_up(trial, run, step)
        start.note_compilation(run)
        start.try_batches(run, trial.n_timed_steps)
        losses = _fetch(run)
        _wait(run)
        before = {name: getattr(run.progress, name) for name in COUNTS}
        waited_s, start_s = run.clock.seconds["data_wait"], time.perf_counter()
        marks = [mark_time(cuda=cuda)]
        gave_up = _step_on(trial, run, step, marks)
        _wait(run)
        timed_s = time.perf_counter() - start_s
        waited_s = run.clock.seconds["data_wait"] - waited_s
        losses += _fetch(run)
    save_s = None
    if trial.with_save:
        # The seconds for which training would have waited.
        start_s = time.perf_counter()
        step_hooks.save_checkpoint(run)
        # Without writing, which continues in the background during further steps.
        save_s = time.perf_counter() - start_s
        run.saver.wait()
    run.progress.note_device(run.device)
    return TrialResult(
        outcome="given up" if gave_up else "measured",
        problem=gave_up,
        device=run.device.type,
        gpu_name=torch.cuda.get_device_name() if cuda else None,
        n_timed_steps=len(marks) - 1,
        **{name: getattr(run.progress, name) - before[name] for name in COUNTS},
        timed_s=timed_s,
        steps_s=tuple(seconds_between(a, b) for a, b in pairwise(marks)),
        data_wait_s=waited_s,
        startup_s=startup_s,
        save_s=save_s,
        peak_memory_bytes=run.progress.peaks.get("peak_memory_reserved_bytes"),
        peak_host_rss_bytes=run.progress.peaks["peak_host_rss_bytes"],
        losses=tuple(losses),
        activated=run.activated,
    )


def _warm_up(trial: Trial, run: TrainingRun, step: Callable[[], None]) -> None:
    for i in range(max(1, trial.n_warmup_steps)):
        start_s = time.perf_counter()
        step()
        if i and trial.long_step_s == math.inf:
            continue
        _wait(run)
        if i and time.perf_counter() - start_s > trial.long_step_s:
            break


def _step_on(
    trial: Trial, run: TrainingRun, step: Callable[[], None], marks: list[Any]
) -> str | None:
    """Run the timed steps and mark where each ends; return why they were abandoned, if so."""
    cuda, start_s = run.device.type == "cuda", time.perf_counter()
    n_before, least = run.progress.n_tokens, trial.least_tokens_per_s
    while len(marks) <= trial.n_timed_steps:
        step()
        marks.append(mark_time(cuda=cuda))
        if cuda and len(marks) > AHEAD:
            # The host runs ahead of a GPU; limits apply to completed, not queued, steps.
            marks[-AHEAD].synchronize()
        if least is not None and len(marks) == N_JUDGED + 1:
            _wait(run)
            rate = (run.progress.n_tokens - n_before) / (time.perf_counter() - start_s)
            if rate < least:
                return f"{rate:,.0f} tokens/s after {N_JUDGED} steps, below {least:,.0f}"
        if time.perf_counter() - start_s >= trial.max_timed_s:
            return None
    return None


def _fetch(run: TrainingRun) -> list[float]:
    pending = list(run.pending)
    step_hooks.flush_steps(run)
    return [float(step.loss) for step in pending]


def _wait(run: TrainingRun) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
