"""Complete a run: train, choose the weights to publish, and store all candidates.

The published weights are at a folder's root; the others, equally complete, below ``steps``.
"""

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from msgspec.structs import replace

from expertflow.core.files import replacing
from expertflow.train import loop, memory
from expertflow.train.model.load import name_base
from expertflow.train.model.weights import gathered, weights_sha256
from expertflow.train.processes import Processes
from expertflow.train.publish import summarize
from expertflow.train.records import Candidate, RunSummary
from expertflow.train.run import Run, TrainInputs, assemble, catching_signals
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.saved.checkpoint_files import OURS, WEIGHTS
from expertflow.train.step_hooks import truncate_log

log = logging.getLogger(__name__)


def train_expert(inputs: TrainInputs, processes: Processes) -> RunSummary:
    """Train to the end and leave the model in ``state/final``.

    If memory runs out and the plan allows it, continue from the last checkpoint with half the
    micro-batch. Raises Interrupted after a signal; run again to resume.
    """
    state = inputs.state
    if inputs.seen_s is None:
        # Once for all attempts: this process's age includes the first attempt's time.
        inputs = replace(inputs, seen_s=checkpoint_files.last_seen_s(state))
    first = True
    with catching_signals() as stop:
        while True:
            plan = memory.apply_oom_retries(inputs.plan, state)
            # As rank 0 reads it.
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
                    # The other ranks wait for this one, so only a restart gets all together again.
                    raise memory.OutOfMemory(
                        f"{error}; run again: it goes on so, after step {done}"
                    ) from error
                log.warning("%s; going on so after step %d", error, done)
            # Only here, after the error is gone, are its tensors unreferenced; and the failed
            # attempt's peak is not the run's.
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


def finish(run: Run) -> RunSummary:
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


def choose_weights(run: Run) -> int:
    best, step = run.progress.best, run.progress.step
    if not run.plan.load_best_model_at_end or best is None or best.step == step:
        return step
    run.saver.wait()
    run.processes.accelerator.wait_for_everyone()
    directory = checkpoint.agree_on(checkpoint_files.best(run.state), run.state, run.processes)
    if directory is None:
        log.warning("no checkpoint of the best weights is whole; the last ones count")
        return step
    found: int = checkpoint_files.read_progress(directory)["step"]
    if found != best.step:
        log.warning("the checkpoint after step %d, the best one, is damaged", best.step)
    checkpoint.restore_weights(directory, model=run.net)
    log.info("the weights after step %d are the best that were saved; they count", found)
    return found


def write_candidates(run: Run, target: Path, *, published: int) -> tuple[Candidate, ...]:
    """Write the model's weights, those of step ``published``, and all other candidates.

    The folder appears atomically. The model holds other weights afterwards. A collective.
    """
    losses = {point.step: point.loss for point in run.progress.eval_points}
    found: list[Candidate] = []

    def add(step: int, folder: Path, path: str) -> None:
        _export(run, folder / path)
        sha256 = weights_sha256(run.net)
        loss = losses.get(step)
        found.append(Candidate(step=step, held_out_loss=loss, path=path, weights_sha256=sha256))

    # Only rank 0 writes.
    writing = replacing(target) if run.processes.is_first else nullcontext(target)
    with writing as partial:
        add(published, partial, ".")
        for directory in _others(run, published):
            checkpoint.restore_weights(directory, model=run.net)
            step = checkpoint_files.step_of(directory)
            add(step, partial, f"steps/step-{step:08d}")
    return tuple(sorted(found, key=lambda candidate: candidate.step))


def _others(run: Run, published: int) -> list[Path]:
    """List the complete checkpoints but the published one, as rank 0 sees them. A collective."""
    kept = checkpoint_files.complete(run.state) if run.processes.is_first else []
    own = [
        directory
        for directory in kept
        if checkpoint_files.step_of(directory) != published and _is_whole(directory)
    ]
    [n], *_ = run.processes.of_all(len(own))
    agreed = (
        checkpoint.agree_on(own[i] if own else None, run.state, run.processes) for i in range(n)
    )
    return [directory for directory in agreed if directory is not None]


def _is_whole(directory: Path) -> bool:
    """Verify a checkpoint's weights to the byte: this session may not have written them."""
    wanted = checkpoint_files.read_record(directory)[OURS]
    weights = {key: {WEIGHTS: wanted[key][WEIGHTS]} for key in ("n_bytes", "xxh3")}
    found = checkpoint_files.difference(directory, weights, contents=True)
    if found is not None:
        log.warning("%s is no candidate: %s", directory, found)
    return found is None


def _export(run: Run, target: Path) -> None:
    whole = None
    if run.plan.world_size > 1 and run.plan.parallel == "fsdp":
        # The adapter, or all weights, gathered from all processes. A head tied to the embedding has
        # a name in the state but no parameter.
        of_all = run.plan.lora is None
        wanted = {n for n, p in run.net.named_parameters() if p.requires_grad or of_all}
        state = run.net.state_dict()
        whole = {name: gathered(t).cpu() for name, t in state.items() if name in wanted}
    if not run.processes.is_first:
        return
    target.mkdir(parents=True)
    run.net.save_pretrained(target, state_dict=whole, safe_serialization=True)
    name_base(target, run.model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = Path(run.model.path) / name
        if source.is_file():
            (target / name).write_bytes(source.read_bytes())
    (target / "README.md").unlink(missing_ok=True)
