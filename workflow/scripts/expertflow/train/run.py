"""What a run is made of while it runs, and how far it has come."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import fields

from expertflow.core.errors import TrainingError
from expertflow.core.records import to_json
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.train.clock import Clock
from expertflow.train.feed.loader import AnyFeed
from expertflow.train.processes import Processes
from expertflow.train.records import EvalPoint, SavePoint
from expertflow.train.saved.saver import Saver
from expertflow.train.timing import StepTimer


class Diverged(TrainingError):
    """The loss is not finite, or has exploded. A retry would come to the same step and loss."""


def one_line(error: BaseException) -> str:
    """Put what an error says on one line; one for want of memory mostly says nothing."""
    text = " ".join(str(error).split())[:400]
    return text or ("host memory ran out" if isinstance(error, MemoryError) else repr(error))


class Progress(Struct, kw_only=True):
    """How far a run has come: what a checkpoint keeps besides tensors.

    ``epochs`` sums up steps, losses, tokens and seconds by epoch; ``sampled`` the seconds of the
    parts of the steps that were timed on the device, with their number under ``steps``.
    """

    step: int = 0
    n_tokens: int = 0
    n_targets: int = 0
    n_padding: int = 0
    n_saves: int = 0
    resumed_at: list[int] = field(default_factory=list)
    eval_points: list[EvalPoint] = field(default_factory=list)
    save_points: list[SavePoint] = field(default_factory=list)
    epochs: dict[str, list[float]] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)
    loss_first: float = math.nan
    loss_last: float = math.nan
    stopped_early_at: int | None = None
    started_at: str = ""

    @property
    def best(self) -> EvalPoint | None:
        """Give the evaluation with the lowest held-out loss so far, the first of equals.

        That of the untrained model does not count: there is nothing of it to publish.
        """
        trained = [point for point in self.eval_points if point.step > 0]
        return min(trained, key=lambda point: point.loss, default=None)

    def saved(self) -> dict[str, Any]:
        """Give what a checkpoint keeps, with the held-out loss of this very step if measured."""
        last = self.eval_points[-1] if self.eval_points else None
        at_this_step = last is not None and last.step == self.step
        return {**to_json(self), "held_out_loss": last.loss if last and at_this_step else None}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> "Progress":
        """Take up what a checkpoint kept."""
        known = {key.name: saved[key.name] for key in fields(cls)}
        known["eval_points"] = [EvalPoint(**point) for point in known["eval_points"]]
        known["save_points"] = [SavePoint(**point) for point in known["save_points"]]
        return cls(**known)


class Run(Struct, kw_only=True):
    """Everything a run is made of while it runs.

    ``net`` is the model with its adapter; ``loss`` the ``PackedLoss`` around it, wrapped for
    several processes, and what a step calls.
    """

    plan: TrainPlan
    net: Any
    loss: Any
    optimizer: Any
    processes: Processes
    feed: AnyFeed
    held_out: PackedRows
    state: Path
    clock: Clock
    timer: StepTimer
    saver: Saver
    stop: Callable[[], bool]
    progress: Progress
    pending: list["PendingStep"] = field(default_factory=list)
    saved_at_s: float = 0.0
    fetched_at_s: float = 0.0
    bar: Any = None

    @property
    def device(self) -> torch.device:
        """Give the device of this process."""
        return self.processes.device

    @property
    def is_over(self) -> bool:
        """Tell whether there is no step left to do."""
        progress = self.progress
        return progress.step >= self.plan.n_steps or progress.stopped_early_at is not None


class PendingStep(Struct, kw_only=True):
    """A step whose loss is still on the device."""

    line: dict[str, Any]
    loss: torch.Tensor
    grad_norm: torch.Tensor
    n_padding: int
    parts: Callable[[], dict[str, float]] | None
