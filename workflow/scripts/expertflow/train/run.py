"""A run: its inputs, its progress, and how it is assembled or resumed."""

import logging
import math
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from tqdm import tqdm

from expertflow.core.attempts import process_age_s
from expertflow.core.errors import TrainingError, single_line
from expertflow.core.process import record_signals
from expertflow.core.records import Record, from_json
from expertflow.plan.memory import suggest_others
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows, read_rows
from expertflow.train.device import apply_switches
from expertflow.train.feed.loader import BaseFeed, make_feed
from expertflow.train.model.load import describe_weights, load_for_training
from expertflow.train.model.start_check import Route
from expertflow.train.optimizers import make_optimizer
from expertflow.train.processes import Processes, wrap_model
from expertflow.train.records import EvalPoint, Fallback, ModelRecord, SavePoint
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.start import prepare_loss
from expertflow.train.timing import Clock, StepTimer

if TYPE_CHECKING:
    # It imports packages that a run on packed rows does not need, as in a peer's environment.
    from expertflow.train.feed.on_the_fly import Documents

log = logging.getLogger(__name__)


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
        # Linux reports KiB.
        found = {"peak_host_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
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
    timer: StepTimer
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


def assemble_run(
    inputs: TrainInputs,
    *,
    processes: Processes,
    saver: Saver,
    stop: Callable[[], bool],
    directory: Path | None,
) -> TrainingRun:
    plan, model = inputs.plan, inputs.model
    progress, clock = _progress(inputs, directory)
    feed, held_out, data = _data(inputs, processes)
    words = [*apply_switches(plan, processes.device), data]
    # The same seed in all processes: they draw the same new adapter weights.
    torch.manual_seed(plan.seed)
    try:
        net = load_for_training(plan, model, processes.device, weights=inputs.weights)
        words.append(describe_weights(net, plan))
        loss, route, progress.fallbacks, more = prepare_loss(
            net, plan, processes, feed, step=progress.step, earlier=progress.fallbacks
        )
        wrapped = wrap_model(loss, plan)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{model.name} alone does not fit in the memory of this {plan.hardware}; use"
            f" {suggest_others(plan)}"
        ) from error
    run = TrainingRun(
        plan=plan,
        model=model,
        state=inputs.state,
        net=net,
        loss=wrapped,
        route=route,
        # After wrapping: fsdp replaces the parameters, and an optimizer would keep the old ones.
        optimizer=processes.wrap_optimizer(make_optimizer(net, plan)),
        processes=processes,
        feed=feed,
        held_out=held_out,
        clock=clock,
        timer=StepTimer(clock, processes.device),
        saver=saver,
        stop=stop,
        progress=progress,
        activated=(*words, *more),
    )
    # Dropout differs between processes; new adapter weights do not.
    torch.manual_seed(plan.seed + processes.rank)
    if directory is not None:
        _resume(run, directory, inputs)
    if processes.is_first and sys.stderr.isatty():
        run.bar = tqdm(total=plan.n_steps, initial=progress.step, unit="step")
    for line in run.activated:
        log.info("%s", line)
    return run


def _data(inputs: TrainInputs, processes: Processes) -> tuple[BaseFeed, PackedRows, str]:
    plan, rows, documents = inputs.plan, inputs.rows, inputs.documents
    if documents is None:
        feed = make_feed(plan, read_rows(rows / "train"), rank=processes.rank)
        source = f"pre-tokenized data from {rows}, {plan.n_sequences} rows"
        return feed, read_rows(rows / "held_out"), source
    if plan.world_size > 1:
        raise TrainingError(
            f"{rows}: has no packed rows, and {plan.world_size} processes cannot tokenize on the"
            " fly; run pack_sequences again"
        )
    from expertflow.train.feed.on_the_fly import read_on_the_fly

    source = f"data tokenized on the fly, {rows} has no packed rows"
    log.warning("%s", source)
    return (*read_on_the_fly(plan, inputs.model, documents), source)


def _progress(inputs: TrainInputs, directory: Path | None) -> tuple[TrainProgress, Clock]:
    since_start = inputs.since_start
    # A second attempt of this process includes the first one's time.
    earlier = {"wall": inputs.seen_s + (0.0 if since_start else process_age_s())}
    if directory is None:
        progress = TrainProgress(started_at=datetime.now(UTC).isoformat(timespec="seconds"))
        # An earlier process left no checkpoint; all of its time is lost.
        progress.resumed_at_steps = (0,) if inputs.seen_s else ()
    else:
        saved = checkpoint_files.read_progress(directory)
        # The file also contains what only the checkpoint itself needs, such as the seed.
        known = {key: saved[key] for key in TrainProgress.__struct_fields__}
        progress, earlier = from_json(TrainProgress, known), saved["clock"] | earlier
    return progress, Clock(earlier, since_process_start=since_start)


def _resume(run: TrainingRun, directory: Path, inputs: TrainInputs) -> None:
    progress, processes = run.progress, run.processes
    saved = checkpoint.restore_checkpoint(
        directory,
        model=run.net,
        optimizer=run.optimizer,
        scaler=processes.accelerator.scaler,
        rank=processes.rank,
        world_size=processes.world_size,
    )
    if saved["run"] != run.state.name:
        raise TrainingError(
            f"{directory}: belongs to run {saved['run']}, with other settings, rows, model or code;"
            f" remove {run.state}"
        )
    # Equal settings give the same order of rows, unless numpy changes its permutations.
    if saved["order_sha256"] != run.feed.order.sha256_of_step(progress.step):
        raise TrainingError(
            f"{directory}: was saved with another order of rows; remove {run.state}"
        )
    # A checkpoint that this process wrote before memory ran out already counts its session.
    if inputs.since_start or saved["clock"]["wall"] <= inputs.seen_s:
        progress.resumed_at_steps += (progress.step,)
    log.info("resumed after step %d from %s", progress.step, directory)
