"""The training loop.

A step divides by the targets of the global batch, over all micro-batches and processes. Losses stay
on the device until the next log line; the clock books every second.
"""

import math
import time
from collections.abc import Iterator

import torch
from msgspec.structs import replace

from expertflow.core.progress import show_activity
from expertflow.train.feed.batches import TENSORS, Batch
from expertflow.train.feed.loader import load_batches
from expertflow.train.memory import memory_advice
from expertflow.train.model.weights import gather_full
from expertflow.train.optimizers import learning_rate
from expertflow.train.processes import no_gradient_sync
from expertflow.train.profiler import StepProfiler
from expertflow.train.run import PendingStep, TrainingRun
from expertflow.train.start import clear_gradients, note_compilation
from expertflow.train.step_hooks import after_step, evaluate_held_out, is_evaluation_due


def train(run: TrainingRun) -> None:
    run.loss.train()
    run.clock.book_startup()
    run.saved_at_s = run.clock.wall_s
    run.fetched_at_s = time.perf_counter()
    # The untrained loss, for comparison with the trained one.
    if run.progress.step == 0:
        evaluate_held_out(run)
    elif is_evaluation_due(run):
        # A signal ended the last session during it.
        after_step(run)
    first = run.progress.step
    feed = load_batches(run.feed, first, plan=run.plan, device=run.device, clock=run.clock)
    what = show_activity(lambda: f"step {run.progress.step + 1}/{run.plan.n_steps}")
    with feed as batches, StepProfiler(run) as profiler, what:
        while not run.is_over:
            with run.clock.part("steps"):
                run.pending.append(train_step(run, batches))
            profiler.step()
            if run.progress.step == first + 1:
                note_compilation(run)
            after_step(run)


def train_step(run: TrainingRun, batches: Iterator[Batch]) -> PendingStep:
    progress, clock, index = run.progress, run.clock, run.progress.step
    start, waited = time.perf_counter(), clock.seconds["data_wait"]
    clock.begin_step(index)
    with clock.part("data_wait"):
        n_targets, n_tokens = run.feed.count_tokens(index)
    loss, n_padding = _accumulate(run, batches, n_targets=n_targets)
    # Set on every step, so that a checkpoint needs no schedule state.
    rate = learning_rate(index, run.plan)
    with run.clock.part("optimizer"), memory_advice(run.plan, run.device):
        grad_norm = _update(run, rate)
    progress.step += 1
    progress.n_tokens += n_tokens
    progress.n_target_tokens += n_targets
    line = {
        "step": progress.step,
        "epoch": progress.step / run.plan.n_steps_per_epoch,
        "learning_rate": rate,
        "n_tokens": n_tokens,
        "n_target_tokens": n_targets,
        "step_s": time.perf_counter() - start,
        "data_wait_s": clock.seconds["data_wait"] - waited,
        "elapsed_s": clock.wall_s,
    }
    return PendingStep(
        line=line, loss=loss, grad_norm=grad_norm, n_padding=n_padding, parts=clock.end_step()
    )


def _accumulate(
    run: TrainingRun, batches: Iterator[Batch], *, n_targets: int
) -> tuple[torch.Tensor, int]:
    """Sum gradients of the mean loss per target; return this process's loss share and padding.

    Distributed wrappers average over processes, hence their number as a factor.
    """
    accelerator = run.processes.accelerator
    total, n_padding = torch.zeros((), device=run.device), 0
    weights = run.feed.weights(run.progress.step)
    for i, weight in enumerate(weights):
        with run.clock.part("data_wait"):
            batch = next(batches)
        with run.clock.part("h2d"):
            batch = on_device(batch, run.device)
        # Processes sum their gradients once per step, after its last micro-batch.
        skipped = no_gradient_sync(run.loss, when=i < len(weights) - 1)
        with memory_advice(run.plan, run.device), skipped:
            with run.clock.part("forward"), accelerator.autocast():
                # A step with only padding and prompts has no targets, and its sum is 0.
                loss = run.loss(batch) * (weight / max(1, n_targets))
            with run.clock.part("backward"):
                accelerator.backward(loss * run.processes.world_size)
        # Stays on the device: .item() here would wait for every micro-batch.
        total += loss.detach()
        n_padding += batch.n_padding_tokens if weight else 0
    return total, n_padding


def on_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # The bounds stay on the host: attention that loops over documents reads them there.
    moved = {name: getattr(batch, name).to(device, non_blocking=True) for name in TENSORS[:3]}
    return replace(batch, **moved)


def _update(run: TrainingRun, rate: float) -> torch.Tensor:
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    # Without a limit the norm is still measured. This also unscales a loss scaler's gradients.
    norm = run.processes.accelerator.clip_grad_norm_(parameters, run.plan.max_grad_norm or math.inf)
    run.optimizer.step()
    clear_gradients(run)
    return gather_full(norm)
