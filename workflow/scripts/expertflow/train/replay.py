"""Look at one step again: from the state before it, each of its micro-batches alone."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from expertflow.core.errors import TrainingError
from expertflow.train import memory
from expertflow.train.assemble import Assignment, assemble
from expertflow.train.feed.batches import Batch
from expertflow.train.feed.loader import load_batches
from expertflow.train.loop import on_device, step
from expertflow.train.model.weights import gathered
from expertflow.train.processes import Processes, adding_up
from expertflow.train.run import Run
from expertflow.train.saved import checkpoint_files
from expertflow.train.saved.saver import Saver


def replay_step(assignment: Assignment, processes: Processes, number: int) -> Iterator[str]:
    """Give a line for every micro-batch of step ``number``, counted from 1.

    The run is taken up at the last checkpoint before the step and trained up to it, which gives
    the weights that the step saw. Nothing in the state is changed.

    Raises:
        TrainingError: there is no such step.
    """
    plan = memory.lowered(assignment.plan, assignment.state)
    if not 1 <= number <= plan.n_steps:
        raise TrainingError(f"--replay-step {number}: the run has steps 1 to {plan.n_steps}")
    saved = checkpoint_files.complete(assignment.state)
    earlier = [path for path in saved if checkpoint_files.read_progress(path)["step"] < number]
    with Saver(assignment.state, keep=plan.save_total_limit) as saver:
        run, _ = assemble(
            replace(assignment, plan=plan),
            processes=processes,
            saver=saver,
            stop=lambda: False,
            directory=earlier[-1] if earlier else None,
        )
        run.loss.train()
        first = run.progress.step
        yield f"from the state after step {first} on to step {number}"
        loading = load_batches(run.feed, first, plan=plan.loader, device=run.device)
        with loading as batches:
            while run.progress.step < number - 1:
                step(run, batches)
            yield from _alone(run, batches)


def _alone(run: Run, batches: Iterator[Batch]) -> Iterator[str]:
    """Run the micro-batches of the next step one by one, each with gradients of its own.

    Where the model is shared out, a gradient is the mean over what all processes ran.
    """
    accelerator, shared = run.processes.accelerator, run.plan.parallel == "fsdp"
    for _ in run.feed.weights(run.progress.step):
        batch = on_device(next(batches), run.device)
        run.optimizer.zero_grad(set_to_none=True)
        with adding_up(run.loss, now=shared):
            with accelerator.autocast():
                loss = run.loss(batch) / max(1, batch.n_target_tokens)
            accelerator.backward(loss)
        scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0
        yield f"{_words(batch, float(loss.detach()))}; {_gradient_words(run.net, scale)}"


def _words(batch: Batch, loss: float) -> str:
    rows = ", ".join(map(str, batch.rows))
    state = "" if math.isfinite(loss) else " NOT FINITE"
    return f"rows {rows}: loss {loss:.6g}{state} over {batch.n_target_tokens} targets"


def _gradient_words(net: Any, scale: float) -> str:
    """Give the norm of the gradient, or the first parameter whose gradient is not finite."""
    squares = 0.0
    for name, parameter in net.named_parameters():
        if parameter.grad is None:
            continue
        norm = float(torch.linalg.vector_norm(gathered(parameter.grad).float())) / scale
        if not math.isfinite(norm):
            return f"the gradient of {name} is not finite"
        squares += norm * norm
    return f"gradient norm {math.sqrt(squares):.6g}"
