"""The training loop: steps, held-out evaluations, checkpoints, and a line of record for each step.

Losses stay on the device between log intervals; every second is booked by the clock.
"""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from expertflow.core.errors import TrainingError
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.train import checkpoint
from expertflow.train.batches import Batch
from expertflow.train.clock import Clock
from expertflow.train.heldout import held_out_loss
from expertflow.train.load import DTYPES
from expertflow.train.loader import AnyFeed, load_batches
from expertflow.train.model import PackedLoss
from expertflow.train.optimizer import learning_rate
from expertflow.train.records import EvalPoint, StepRecord

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved."""


class Diverged(TrainingError):
    """The loss is not finite. A retry would come to the same step and the same loss."""


@dataclass(slots=True)
class Run:
    """Everything a run is made of while it runs."""

    plan: TrainPlan
    model: Any
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    feed: AnyFeed
    held_out: PackedRows
    device: torch.device
    state: Path
    clock: Clock
    stop: Callable[[], bool]
    step: int = 0
    n_tokens: int = 0
    n_targets: int = 0
    n_padding: int = 0
    n_saves: int = 0
    resumed_at: list[int] = field(default_factory=list)
    eval_points: list[EvalPoint] = field(default_factory=list)
    epochs: dict[int, list[float]] = field(default_factory=dict)
    loss_first: float = math.nan
    loss_last: float = math.nan
    started_at: str = ""
    pending: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = field(default_factory=list)
    saved_at_s: float = 0.0


def train(run: Run) -> None:
    """Run from the current step to the last one.

    Raises:
        Interrupted: a signal came; the state was saved first.
        Diverged: the loss is not finite.
        TrainingError: memory is short.
    """
    plan = run.plan
    run.model.train()
    run.clock.started()
    run.saved_at_s = run.clock.wall_s
    if run.step == 0:
        _evaluate(run)
    with load_batches(run.feed, run.step, plan=plan.loader, device=run.device) as batches:
        while run.step < plan.n_steps:
            _step_and_book(run, batches)


def _step_and_book(run: Run, batches: Iterator[Batch]) -> None:
    """Do one step and what is due after it: a log line, an evaluation, a checkpoint."""
    plan = run.plan
    with run.clock.part("steps"):
        _step(run, batches)
        if run.step % plan.logging_steps == 0 or run.step == plan.n_steps:
            flush(run)
    if run.step % plan.eval_steps == 0 or run.step == plan.n_steps:
        _evaluate(run)
    due = run.clock.wall_s - run.saved_at_s > plan.save_every_minutes * 60
    last = run.step == plan.n_steps
    if run.stop() and not last:
        save(run)
        raise Interrupted(f"stopped after step {run.step}")
    if last or due or run.step % plan.save_steps == 0:
        save(run)


def _step(run: Run, batches: Iterator[Batch]) -> None:
    """Do one optimiser step over the global batch."""
    plan, clock = run.plan, run.clock
    start = time.perf_counter()
    waited_before = clock.seconds["data_wait"]
    with clock.part("data_wait"):
        n_targets = run.feed.n_targets(run.step)
        n_batches = len(run.feed.micro_batches(run.step))
    rate = learning_rate(run.step, plan)
    loss, n_tokens = _accumulate(run, batches, n_batches=n_batches, n_targets=n_targets)
    with clock.part("optimizer"):
        norm = _update(run, rate)
    run.step += 1
    run.n_tokens += n_tokens
    run.n_targets += n_targets
    line = {
        "step": run.step,
        "epoch": run.step / plan.n_steps_per_epoch,
        "learning_rate": rate,
        "n_tokens": n_tokens,
        "n_target_tokens": n_targets,
        "step_s": time.perf_counter() - start,
        "data_wait_s": clock.seconds["data_wait"] - waited_before,
        "elapsed_s": clock.wall_s,
    }
    run.pending.append((line, loss, norm))


def _accumulate(
    run: Run, batches: Iterator[Batch], *, n_batches: int, n_targets: int
) -> tuple[torch.Tensor, int]:
    """Add up gradients of the global batch's mean loss per target; give it and the tokens."""
    total = torch.zeros((), device=run.device)
    n_tokens = 0
    for _ in range(n_batches):
        with run.clock.part("data_wait"):
            batch = next(batches)
        with run.clock.part("forward"), autocast(run.plan, run.device), memory_advice(run.plan):
            loss = PackedLoss(run.model)(batch) / max(1, n_targets)
        with run.clock.part("backward"), memory_advice(run.plan):
            scaled = run.scaler.scale(loss) if run.scaler else loss
            scaled.backward()
        total += loss.detach()
        n_tokens += batch.n_tokens
        run.n_padding += batch.n_padding_tokens
    return total, n_tokens


def _update(run: Run, rate: float) -> torch.Tensor:
    """Clip, step and clear; give the gradient norm before clipping."""
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    if run.scaler:
        run.scaler.unscale_(run.optimizer)
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.plan.max_grad_norm or math.inf)
    if run.scaler:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    else:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm.detach()


def flush(run: Run) -> None:
    """Fetch pending losses from the device, check them, and append them to steps.jsonl."""
    if not run.pending:
        return
    losses = torch.stack([loss for _, loss, _ in run.pending]).tolist()
    norms = torch.stack([norm for _, _, norm in run.pending]).tolist()
    records = [
        StepRecord(**line, loss=loss, grad_norm=norm if math.isfinite(norm) else None)
        for (line, _, _), loss, norm in zip(run.pending, losses, norms, strict=True)
    ]
    run.pending.clear()
    for record in records:
        bad_norm = record.grad_norm is None and run.scaler is None
        if not math.isfinite(record.loss) or bad_norm:
            raise Diverged(
                f"the loss of step {record.step} is {record.loss}, its gradient norm"
                f" {'not finite' if bad_norm else record.grad_norm}; lower training.learning_rate"
                f" ({run.plan.learning_rate:g}) or check the data; the last good state is in"
                f" {run.state}"
            )
        _book_epoch(run, record)
    kept = records if run.plan.track_per_step_metrics else records[-1:]
    with (run.state / "steps.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(asdict(record)) + "\n" for record in kept)
    last = records[-1]
    mean_s = sum(record.step_s for record in records) / len(records)
    log.info(
        "step %d/%d loss %.4f lr %.2e %.0f tokens/s",
        last.step, run.plan.n_steps, last.loss, last.learning_rate, last.n_tokens / mean_s,
    )  # fmt: skip


def _book_epoch(run: Run, record: StepRecord) -> None:
    """Add a step to its epoch: steps, sum of losses, tokens, seconds."""
    if record.step == 1:
        run.loss_first = record.loss
    run.loss_last = record.loss
    sums = run.epochs.setdefault((record.step - 1) // run.plan.n_steps_per_epoch, [0.0] * 4)
    for i, value in enumerate((1, record.loss, record.n_tokens, record.step_s)):
        sums[i] += value


def _evaluate(run: Run) -> None:
    start = time.perf_counter()
    with run.clock.part("eval"), autocast(run.plan, run.device):
        loss, n_targets = held_out_loss(
            PackedLoss(run.model), run.held_out, micro_batch_size=run.plan.micro_batch_size
        )
    point = EvalPoint(
        step=run.step, loss=loss, n_target_tokens=n_targets, eval_s=time.perf_counter() - start
    )
    if not math.isfinite(loss):
        raise Diverged(
            f"the held-out loss after step {run.step} is {loss}; lower training.learning_rate"
            f" ({run.plan.learning_rate:g}); earlier checkpoints are in {run.state}"
        )
    run.eval_points.append(point)
    log.info("held-out loss %.4f after step %d", loss, run.step)


def save(run: Run) -> None:
    """Write a checkpoint of the current step."""
    flush(run)
    with run.clock.part("checkpoint"):
        run.n_saves += 1
        progress = {
            "step": run.step,
            "n_tokens": run.n_tokens,
            "n_targets": run.n_targets,
            "n_padding": run.n_padding,
            "n_saves": run.n_saves,
            "resumed_at": run.resumed_at,
            "eval_points": [asdict(point) for point in run.eval_points],
            "epochs": {str(epoch): sums for epoch, sums in run.epochs.items()},
            "loss_first": run.loss_first,
            "loss_last": run.loss_last,
            "started_at": run.started_at,
            "clock": run.clock.totals(),
        }
        checkpoint.save(
            run.state,
            model=run.model,
            optimizer=run.optimizer,
            scaler=run.scaler,
            progress=progress,
            keep=run.plan.save_total_limit,
        )
    run.saved_at_s = run.clock.wall_s


@contextlib.contextmanager
def autocast(plan: TrainPlan, device: torch.device) -> Iterator[None]:
    """Compute in the plan's precision."""
    enabled = plan.precision != "fp32"
    with torch.autocast(device.type, dtype=DTYPES[plan.precision], enabled=enabled):
        yield


@contextlib.contextmanager
def memory_advice(plan: TrainPlan) -> Iterator[None]:
    """Turn an out-of-memory error into what to change, and to what."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        half = max(1, plan.micro_batch_size // 2)
        double = plan.n_accumulation_steps * plan.micro_batch_size // half
        change = (
            f"set training.batch_size to {half} and gradient_accumulation_steps to {double} (the"
            " global batch stays)"
            if plan.micro_batch_size > 1
            else "set training.gradient_checkpointing to true"
        )
        predicted = (plan.predicted_peak_bytes or 0) / (1 << 30)
        raise TrainingError(
            f"out of memory at micro-batch {plan.micro_batch_size} (predicted peak"
            f" {predicted:.1f} GiB); {change}"
        ) from error
