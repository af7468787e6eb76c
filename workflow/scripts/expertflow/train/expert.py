"""Bring a run to its end and leave the trained model in its state."""

import gc
import logging
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from expertflow.core.files import replacing
from expertflow.core.records import to_json
from expertflow.train import checkpoint, loop, memory
from expertflow.train.activate import catching_signals
from expertflow.train.assemble import Assignment, assemble
from expertflow.train.processes import Processes
from expertflow.train.run import Run
from expertflow.train.saver import Saver
from expertflow.train.step_log import cut
from expertflow.train.timing import PARTS
from expertflow.train.weights import gathered, weights_sha256

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
        assignment = replace(assignment, seen_s=checkpoint.last_seen_s(state))
    first = True
    with catching_signals() as stop:
        while True:
            plan = memory.lowered(assignment.plan, state)
            try:
                now = replace(assignment, plan=plan, since_start=first)
                return _attempt(now, processes, stop)
            except memory.OutOfMemory as error:
                newest = checkpoint.newest(state)
                done = 0 if newest is None else checkpoint.read_progress(newest)["step"]
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
            directory=checkpoint.newest(state),
        )
        cut(run)
        memory.rehearse(run)
        loop.train(run)
        return _finish(run, assignment, words)


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
        _export(run, Path(assignment.model.path), assignment.state / "final")
        sha256 = weights_sha256(run.net)
    with run.clock.part("other"):
        run.processes.end_trackers()
    outcome = {**_outcome(run, assignment, words, published), "weights_sha256": sha256}
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
        "world_size": run.processes.world_size,
        "micro_batch_size": run.plan.micro_batch_size,
        "n_accumulation_steps": run.plan.n_accumulation_steps,
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
    directory = checkpoint.best(run.state)
    if directory is None:
        log.warning("no checkpoint of the best weights is whole; the last ones count")
        return step
    found: int = checkpoint.read_progress(directory)["step"]
    if found != best.step:
        log.warning("the checkpoint after step %d, the best one, is damaged", best.step)
    checkpoint.restore_weights(directory, model=run.net)
    log.info("the weights after step %d are the best that were saved; they count", found)
    return found


def _export(run: Run, base: Path, target: Path) -> None:
    """Write the trained model or adapter, with its tokenizer, as safetensors."""
    whole = _whole(run) if run.plan.world_size > 1 and run.plan.parallel == "fsdp" else None
    if not run.processes.is_first:
        return
    with replacing(target) as partial:
        partial.mkdir(parents=True)
        run.net.save_pretrained(partial, state_dict=whole, safe_serialization=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = base / name
            if source.is_file():
                (partial / name).write_bytes(source.read_bytes())
        (partial / "README.md").unlink(missing_ok=True)


def _whole(run: Run) -> dict[str, torch.Tensor]:
    """Gather what is to be written from the shares of all processes: the adapter, or everything."""
    adapter = run.plan.lora is not None
    # A head that is tied to the embedding has a name in the state, and no parameter of its own.
    wanted = {n for n, p in run.net.named_parameters() if p.requires_grad or not adapter}
    state = run.net.state_dict()
    return {name: gathered(tensor).cpu() for name, tensor in state.items() if name in wanted}
