"""The state of a run: what it is made from, how far it has come, and why it may end early."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from msgspec.structs import fields

from expertflow.core.errors import TrainingError
from expertflow.core.process import noted_signals
from expertflow.core.records import Record, from_json, to_json
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.loader import BaseFeed
from expertflow.train.processes import Processes
from expertflow.train.records import EvalPoint, ModelRecord, SavePoint
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.timing import Clock, StepTimer

if TYPE_CHECKING:
    # It brings packages that a run on packed rows does without.
    from expertflow.train.feed.on_the_fly import Documents


class Diverged(TrainingError):
    """The loss is not finite, or has exploded. A retry would come to the same step and loss."""


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; a MemoryError mostly has none."""
    text = " ".join(str(error).split())[:400]
    return text or ("host memory ran out" if isinstance(error, MemoryError) else repr(error))


@contextmanager
def catching_signals() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM, SIGINT and SIGHUP end the run after the current step; yield whether one came.

    A SIGHUP that the caller has ignored (``nohup``) stays ignored.
    """
    with noted_signals(ignorable=[signal.SIGHUP]) as came:
        yield lambda: bool(came)


class TrainInputs(Record, frozen=True, kw_only=True):
    """What a run is made from, and where its state is.

    ``weights`` is where the model is read on this machine; null: where its record says. With
    ``documents`` these are tokenized in every step and the rows are not read. ``since_start``:
    whether all that this process did so far belongs to the run and is not booked yet. ``seen_s`` is
    where the run's clock stood when this process took it up; null: ask the state.
    """

    plan: TrainPlan
    model: ModelRecord
    rows: Path
    state: Path
    weights: Path | None = None
    documents: "Documents | None" = None
    since_start: bool = True
    seen_s: float | None = None


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
        """The evaluation with the lowest held-out loss so far, the first of equals.

        That of the untrained model does not count: there is nothing of it to publish.
        """
        trained = [point for point in self.eval_points if point.step > 0]
        return min(trained, key=lambda point: point.loss, default=None)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the held-out loss of this very step if measured."""
        losses = {point.step: point.loss for point in self.eval_points}
        return {**to_json(self), "held_out_loss": losses.get(self.step)}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> "Progress":
        progress: Progress = from_json(cls, {key.name: saved[key.name] for key in fields(cls)})
        return progress


class Run(Struct, kw_only=True):
    """Everything a run is made of while it runs.

    ``net`` is the model with its adapter; ``loss`` the ``PackedLoss`` around it, wrapped for
    several processes, and what a step calls. ``activated`` says in words what is on.
    """

    plan: TrainPlan
    model: ModelRecord
    state: Path
    net: Any
    loss: Any
    optimizer: Any
    processes: Processes
    feed: BaseFeed
    held_out: PackedRows
    clock: Clock
    timer: StepTimer
    saver: Saver
    stop: Callable[[], bool]
    progress: Progress
    activated: tuple[str, ...]
    pending: list["PendingStep"] = field(default_factory=list)
    saved_at_s: float = 0.0
    fetched_at_s: float = 0.0
    bar: Any = None

    @property
    def device(self) -> torch.device:
        return self.processes.device

    @property
    def is_over(self) -> bool:
        progress = self.progress
        return progress.step >= self.plan.n_steps or progress.stopped_early_at is not None


class PendingStep(Struct, kw_only=True):
    """A step whose loss is still on the device."""

    line: dict[str, Any]
    loss: torch.Tensor
    grad_norm: torch.Tensor
    n_padding: int
    parts: Callable[[], dict[str, float]] | None
