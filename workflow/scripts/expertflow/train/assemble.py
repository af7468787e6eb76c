"""Assemble a run from its inputs: model, optimizer, rows, and where it was when it last stopped."""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from expertflow.core.errors import TrainingError
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows, read_rows
from expertflow.train.device import activate
from expertflow.train.feed.loader import BaseFeed, feed_of
from expertflow.train.model.attention import activate_flash_3, describe
from expertflow.train.model.compiled import compile_layers
from expertflow.train.model.load import DTYPES, load_for_training, loaded_words
from expertflow.train.model.loss import loss_route
from expertflow.train.model.packed import PackedLoss, causal_lm, head_weight
from expertflow.train.model.self_check import check_model
from expertflow.train.optimizer import make_optimizer
from expertflow.train.processes import Processes, wrap
from expertflow.train.run import Progress, Run, TrainInputs
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.timing import Clock, StepTimer, process_age_s

log = logging.getLogger(__name__)


def assemble(
    inputs: TrainInputs,
    *,
    processes: Processes,
    saver: Saver,
    stop: Callable[[], bool],
    directory: Path | None,
) -> Run:
    """Make a run, resumed from a checkpoint if there is one.

    Raises:
        TrainingError: the model cannot be trained so, or the state is of another run.
    """
    plan, model = inputs.plan, inputs.model
    progress, clock = _progress(inputs, directory)
    feed, held_out, data = _data(inputs, processes)
    words = [*activate(plan, processes.device), data]
    torch.manual_seed(plan.seed)
    try:
        net = load_for_training(plan, model, processes.device, weights=inputs.weights)
        words.append(loaded_words(net, plan))
        loss, more = _loss(net, plan, processes)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{model.name} alone does not fit into the memory of this {plan.hardware};"
            " use method qlora, a smaller model or a larger card"
        ) from error
    run = Run(
        plan=plan,
        model=model,
        state=inputs.state,
        net=net,
        loss=loss,
        optimizer=processes.scaled(make_optimizer(net, plan)),
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
    # Dropout differs from process to process; weights that are made here do not.
    torch.manual_seed(plan.seed + processes.rank)
    if directory is not None:
        _resume(run, directory)
    if processes.is_first and sys.stderr.isatty():
        run.bar = tqdm(total=plan.n_steps, initial=progress.step, unit="step")
    for line in run.activated:
        log.info("%s", line)
    return run


def _loss(net: Any, plan: TrainPlan, processes: Processes) -> tuple[torch.nn.Module, list[str]]:
    """Wrap the model in its loss, once it is known to suit it; return the routes in words, too."""
    device, smoothing = processes.device, plan.label_smoothing_factor
    loss = PackedLoss(net, label_smoothing=smoothing)
    kernel = describe(plan.attention, device=device, dtype=DTYPES[plan.precision])
    flash = activate_flash_3(device) if device.type == "cuda" else "no CUDA kernels"
    words = [f"attention {plan.attention}: {kernel}; {flash}"]
    with processes.accelerator.autocast():
        checked = check_model(loss)
        route = loss_route(head_weight(causal_lm(net)), label_smoothing=smoothing)
    words += [f"loss {route}", checked]
    if plan.torch_compile:
        words.append(compile_layers(net, dtype=DTYPES[plan.precision]))
    else:
        words.append("compilation off")
    return wrap(loss, plan), words


def _data(inputs: TrainInputs, processes: Processes) -> tuple[BaseFeed, PackedRows, str]:
    """Return what the run reads, what it is evaluated on, and a line about both."""
    plan, rows, documents = inputs.plan, inputs.rows, inputs.documents
    if documents is None:
        feed = feed_of(plan, read_rows(rows / "train"), rank=processes.rank)
        said = f"pre-tokenised data from {rows}, {plan.n_sequences} rows"
        return feed, read_rows(rows / "held_out"), said
    if plan.world_size > 1:
        raise TrainingError(
            f"{rows}: holds no packed rows, and {plan.world_size} processes cannot tokenise on the"
            " fly; run pack_sequences again"
        )
    from expertflow.train.feed.on_the_fly import read_on_the_fly

    said = f"data tokenised on the fly, {rows} holds no packed rows"
    log.warning("%s", said)
    return (*read_on_the_fly(plan, inputs.model, documents), said)


def _progress(inputs: TrainInputs, directory: Path | None) -> tuple[Progress, Clock]:
    """Return how far the run is; its clock goes on from where it was last seen."""
    since_start = inputs.since_start
    # A second attempt of this process is charged with what the first one took.
    seen_s = inputs.seen_s
    if seen_s is None:
        seen_s = checkpoint_files.last_seen_s(inputs.state)
    wall = {"wall": seen_s + (0.0 if since_start else process_age_s())}
    if directory is None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Progress(started_at=now), Clock(wall, since_process_start=since_start)
    saved = checkpoint_files.read_progress(directory)
    clock = Clock(saved["clock"] | wall, since_process_start=since_start)
    return Progress.restored(saved), clock


def _resume(run: Run, directory: Path) -> None:
    """Restore weights, optimizer and random numbers, if its rows are those that come next."""
    progress, processes = run.progress, run.processes
    saved = checkpoint.restore(
        directory,
        model=run.net,
        optimizer=run.optimizer,
        scaler=processes.accelerator.scaler,
        rank=processes.rank,
        world_size=processes.world_size,
    )
    if saved["run"] != run.state.name:
        raise TrainingError(
            f"{directory}: is of run {saved['run']}, with other settings, rows, model or code;"
            f" remove {run.state}"
        )
    if saved["order_sha256"] != run.feed.order.sha256_of_step(progress.step):
        raise TrainingError(
            f"{directory}: was saved before other rows than those that come next; remove"
            f" {run.state}"
        )
    progress.resumed_at.append(progress.step)
    log.info("resumed after step %d from %s", progress.step, directory)
