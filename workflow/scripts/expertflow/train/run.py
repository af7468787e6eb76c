"""A run: its inputs, its objects, its progress."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from expertflow.core.errors import single_line
from expertflow.core.process import peak_resident_bytes, record_signals
from expertflow.core.records import Record
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.loader import BaseFeed
from expertflow.train.model.start_check import Route
from expertflow.train.processes import Processes
from expertflow.train.records import EvalPoint, Fallback, ModelRecord, SavePoint
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.timing import Clock

if TYPE_CHECKING:
    # It imports packages that a run on packed rows does not need, as in a peer's environment.
    from expertflow.train.feed.on_the_fly import Documents


def one_line(error: BaseException) -> str:
    text = single_line(error, 400)
    return text or ("host memory ran out" if isinstance(error, MemoryError) else repr(error))


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """End the run after the current step on SIGTERM, SIGINT or SIGHUP (under nohup, not SIGHUP)."""
    with record_signals(ignorable=[signal.SIGHUP]) as came:
        yield lambda: bool(came)


class TrainInputs(Record, frozen=True, kw_only=True):
    """A run's inputs and the location of its state.

    ``weights``: a copy of the model to read. With ``documents``, rows are not read.
    ``since_start``: all time of this process so far belongs to the run and is not booked yet.
    ``seen_s``: the run's clock when this process resumed it.
    """

    plan: TrainPlan
    model: ModelRecord
    rows: Path
    state: Path
    weights: Path | None = None
    documents: "Documents | None" = None
    since_start: bool = True
    seen_s: float = 0.0


class TrainProgress(Struct, kw_only=True):
    """A run's progress: what a checkpoint keeps besides tensors.

    ``epochs`` sums steps, losses, tokens and seconds by epoch; ``sampled`` sums device seconds of
    the timed steps' parts, and counts these steps under ``steps``. ``peaks`` are the most bytes of
    memory that any session used, ``gpu_names`` the cards of all sessions.
    """

    step: int = 0
    n_tokens: int = 0
    n_target_tokens: int = 0
    n_padding_tokens: int = 0
    n_saves: int = 0
    resumed_at_steps: tuple[int, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    eval_points: tuple[EvalPoint, ...] = ()
    save_points: tuple[SavePoint, ...] = ()
    epochs: dict[str, list[float]] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    gpu_names: tuple[str, ...] = ()
    loss_first: float = math.nan
    loss_last: float = math.nan
    stopped_early_at_step: int | None = None
    started_at: str = ""

    @property
    def best(self) -> EvalPoint | None:
        """The evaluation with the lowest loss, except the untrained model's."""
        trained = [point for point in self.eval_points if point.step > 0]
        return min(trained, key=lambda point: point.loss, default=None)

    def note_device(self, device: torch.device) -> None:
        found = {"peak_host_rss_bytes": peak_resident_bytes()}
        if device.type == "cuda":
            found["peak_memory_allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["peak_memory_reserved_bytes"] = torch.cuda.max_memory_reserved()
            names = (*self.gpu_names, torch.cuda.get_device_name())
            self.gpu_names = tuple(dict.fromkeys(names))
        self.peaks = {name: max(n, self.peaks.get(name, 0)) for name, n in found.items()}


class TrainingRun(Struct, kw_only=True):
    """All objects of a run; steps call ``loss``, the (wrapped) ``PackedLoss`` of ``net``."""

    plan: TrainPlan
    model: ModelRecord
    state: Path
    net: Any
    loss: Any
    route: Route
    optimizer: Any
    processes: Processes
    feed: BaseFeed
    held_out: PackedRows
    clock: Clock
    saver: Saver
    stop: Callable[[], bool]
    progress: TrainProgress
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
        return progress.step >= self.plan.n_steps or progress.stopped_early_at_step is not None


class PendingStep(Struct, kw_only=True):
    line: dict[str, Any]
    loss: torch.Tensor
    grad_norm: torch.Tensor
    n_padding: int
    parts: Callable[[], dict[str, float]] | None
