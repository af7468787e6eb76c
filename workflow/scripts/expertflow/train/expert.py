"""Bring a run to its end and leave the trained model in its state."""

import gc
import logging
from collections.abc import Callable

import torch
from msgspec.structs import replace

from expertflow.core.records import to_json
from expertflow.train import loop, memory
from expertflow.train.assemble import assemble
from expertflow.train.candidates import choose_weights, write_candidates
from expertflow.train.processes import Processes
from expertflow.train.publish import summarize
from expertflow.train.records import RunSummary
from expertflow.train.run import Run, TrainInputs, catching_signals
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.saver import Saver
from expertflow.train.step_hooks import truncate_log

log = logging.getLogger(__name__)


def train_expert(inputs: TrainInputs, processes: Processes) -> RunSummary:
    """Train to the end and leave the model in ``state/final``.

    A run that is out of memory goes on from its last checkpoint with half the micro-batch, where
    the plan allows it.

    Raises:
        Interrupted: a signal came; run again to resume.
        TrainingError: the run cannot start or go on.
    """
    state = inputs.state
    _init_trackers(inputs, processes)
    if inputs.seen_s is None:
        # Once for all attempts: what the first one took is in this process's age.
        inputs = replace(inputs, seen_s=checkpoint_files.last_seen_s(state))
    first = True
    with catching_signals() as stop:
        while True:
            plan = memory.apply_oom_retries(inputs.plan, state)
            # As the first process reads it.
            [micro, n_accumulation], *_ = processes.of_all(
                plan.batch_size, plan.gradient_accumulation_steps
            )
            plan = replace(plan, batch_size=micro, gradient_accumulation_steps=n_accumulation)
            try:
                return _attempt(replace(inputs, plan=plan, since_start=first), processes, stop)
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
            # Only here, with the error gone, nothing holds on to the tensors any more; and the
            # failed attempt's peak is not that of the run.
            first = False
            processes.accelerator.free_memory()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def _attempt(inputs: TrainInputs, processes: Processes, stop: Callable[[], bool]) -> RunSummary:
    state = inputs.state
    with Saver(state, keep=inputs.plan.save_total_limit) as saver:
        newest = checkpoint.agree_on(checkpoint_files.newest(state), state, processes)
        run = assemble(inputs, processes=processes, saver=saver, stop=stop, directory=newest)
        checkpoint.check_same_step(run.progress.step, processes)
        truncate_log(run)
        memory.probe_longest_batch(run)
        loop.train(run)
        return finish(run)


def _init_trackers(inputs: TrainInputs, processes: Processes) -> None:
    """Open what the run is reported to besides its own log, with the settings of the plan."""
    if inputs.plan.report_to == "none":
        return
    settings = to_json(inputs.plan)
    plain = {k: v for k, v in settings.items() if isinstance(v, bool | int | float | str)}
    processes.accelerator.init_trackers(f"expertflow-{inputs.plan.expert}", config=plain)


def finish(run: Run) -> RunSummary:
    """Choose the weights that count, write them out, and sum the run up."""
    if run.bar is not None:
        run.bar.close()
    published = choose_weights(run)
    with run.clock.part("checkpoint"):
        run.saver.wait()
        candidates = write_candidates(run, run.state / "final", published=published)
    with run.clock.part("other"):
        run.processes.end_trackers()
    summary = summarize(run, published=published, candidates=candidates)
    run.processes.shutdown_process_group()
    return summary
