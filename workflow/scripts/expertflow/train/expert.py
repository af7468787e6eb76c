"""Bring a run to its end and leave the trained model in its state."""

import gc
import logging
import resource
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from expertflow.core.records import to_json
from expertflow.plan.records import TrainPlan
from expertflow.train import loop, memory
from expertflow.train.activate import catching_signals
from expertflow.train.assemble import Assignment, assemble
from expertflow.train.candidates import HERE, write_candidates
from expertflow.train.processes import Processes
from expertflow.train.profile.files import ASKED
from expertflow.train.run import Run
from expertflow.train.saved import agree, checkpoint, checkpoint_files
from expertflow.train.saved.saver import Saver
from expertflow.train.step_log import cut
from expertflow.train.timing import PARTS

log = logging.getLogger(__name__)


def train_expert(assignment: Assignment, processes: Processes) -> dict[str, Any]:
    """Train to the end and leave the model in ``state/final``.

    A run that is out of memory goes on from its last checkpoint with half the micro-batch, where
    the plan allows it. Returns what the training record needs beyond plan, packing and model.

    Raises:
        Interrupted: a signal came; run again to resume.
        TrainingError: the run cannot start or go on.
    """
    state = assignment.state
    _init_trackers(assignment, processes)
    if assignment.seen_s is None:
        # Once for all attempts: what the first one took is in this process's age.
        assignment = replace(assignment, seen_s=checkpoint_files.last_seen_s(state))
    first = True
    with catching_signals() as stop:
        while True:
            plan = _lowered(assignment, processes)
            try:
                now = replace(assignment, plan=plan, since_start=first)
                return _attempt(now, processes, stop)
            except memory.OutOfMemory as error:
                newest = checkpoint_files.newest(state)
                done = 0 if newest is None else checkpoint_files.read_progress(newest)["step"]
                noted = memory.note_retry(plan, state, after_step=done, message=str(error))
                if not noted:
                    raise
                if plan.world_size > 1:
                    # The others wait for this one, so only a new start gets all together again.
                    raise memory.OutOfMemory(
                        f"{error}; run again: it goes on so, after step {done}"
                    ) from error
                log.warning("%s; going on so after step %d", error, done)
            # Only here, with the error gone, nothing holds on to the tensors any more.
            first = False
            processes.accelerator.free_memory()
            _let_go()


def _attempt(
    assignment: Assignment, processes: Processes, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Train from the newest checkpoint to the end."""
    state = assignment.state
    with Saver(state, keep=assignment.plan.save_total_limit) as saver:
        run, words = assemble(
            assignment,
            processes=processes,
            saver=saver,
            stop=stop,
            directory=agree.chosen(checkpoint_files.newest(state), state, processes),
        )
        agree.check_step(run.progress.step, processes)
        cut(run)
        memory.rehearse(run)
        loop.train(run)
        return _finish(run, assignment, words)


def _lowered(assignment: Assignment, processes: Processes) -> TrainPlan:
    """Give the plan after what the run learned about memory, as the first process reads it."""
    plan = memory.lowered(assignment.plan, assignment.state)
    ours = plan.batch_size, plan.gradient_accumulation_steps
    [micro, n_accumulation], *_ = processes.of_all(*ours)
    return replace(plan, batch_size=micro, gradient_accumulation_steps=n_accumulation)


def _let_go() -> None:
    """Give memory back after a failed attempt, whose peak is not that of the run."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _init_trackers(assignment: Assignment, processes: Processes) -> None:
    """Open what the run is reported to besides its own log, with the settings of the plan."""
    if assignment.plan.report_to == "none":
        return
    settings = to_json(assignment.plan)
    plain = {k: v for k, v in settings.items() if isinstance(v, bool | int | float | str)}
    processes.accelerator.init_trackers(f"expertflow-{assignment.plan.expert}", config=plain)


def _finish(run: Run, assignment: Assignment, words: tuple[str, ...]) -> dict[str, Any]:
    """Choose the weights that count, write them out, and sum the run up."""
    if run.bar is not None:
        run.bar.close()
    published = _choose_weights(run)
    with run.clock.part("checkpoint"):
        run.saver.wait()
        kept = write_candidates(
            run, assignment.model, assignment.state / "final", published=published
        )
    with run.clock.part("other"):
        run.processes.end_trackers()
    outcome = {
        **_outcome(run, assignment, words, published),
        "weights_sha256": next(c.weights_sha256 for c in kept if c.path == HERE),
        "candidates": to_json(kept),
    }
    run.processes.part()
    return outcome


def _outcome(
    run: Run, assignment: Assignment, words: tuple[str, ...], published: int
) -> dict[str, Any]:
    progress, cuda = run.progress, run.device.type == "cuda"
    return {
        "started_at": progress.started_at,
        "device": run.device.type,
        "activated": list(words),
        "n_threads": torch.get_num_threads(),
        "n_steps": progress.step,
        "stopped_early_at_step": progress.stopped_early_at,
        "published_step": published,
        ASKED: run.plan.profile_steps,
        "world_size": run.processes.world_size,
        "micro_batch_size": run.plan.batch_size,
        "n_accumulation_steps": run.plan.gradient_accumulation_steps,
        "memory_retries": to_json(memory.retries(assignment.state)),
        "sampled_steps": _mean_parts(progress.sampled),
        "n_tokens": progress.n_tokens,
        "n_target_tokens": progress.n_targets,
        "n_padding_tokens": progress.n_padding,
        "eval_points": to_json(progress.eval_points),
        "save_points": to_json(progress.save_points),
        "epochs": progress.epochs,
        "loss_first": progress.loss_first,
        "loss_last": progress.loss_last,
        "clock": run.clock.totals(),
        "resumed_at_steps": progress.resumed_at,
        "n_saves": progress.n_saves,
        "checkpoint_write_s": run.saver.written_s,
        "n_checkpoint_bytes": run.saver.n_bytes,
        "peak_memory_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_host_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _mean_parts(sampled: dict[str, float]) -> dict[str, float] | None:
    """Give the mean seconds of a timed step's parts; null where none was timed."""
    if not sampled:
        return None
    n_steps = sampled["steps"]
    means = {f"{name}_s": sampled[name] / n_steps for name in PARTS}
    return {"n_steps": int(n_steps), **means}


def _choose_weights(run: Run) -> int:
    """Put the best weights back where they are asked for and are not the last; give their step."""
    best, step = run.progress.best, run.progress.step
    if not run.plan.load_best_model_at_end or best is None or best.step == step:
        return step
    run.saver.wait()
    run.processes.accelerator.wait_for_everyone()
    directory = agree.chosen(checkpoint_files.best(run.state), run.state, run.processes)
    if directory is None:
        log.warning("no checkpoint of the best weights is whole; the last ones count")
        return step
    found: int = checkpoint_files.read_progress(directory)["step"]
    if found != best.step:
        log.warning("the checkpoint after step %d, the best one, is damaged", best.step)
    checkpoint.restore_weights(directory, model=run.net)
    log.info("the weights after step %d are the best that were saved; they count", found)
    return found
