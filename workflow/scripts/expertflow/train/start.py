"""Start or resume a run: load it, choose and check its route, compile, fall back where it fails."""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from expertflow.core.attempts import process_age_s
from expertflow.core.errors import TrainingError, single_line
from expertflow.core.records import from_json
from expertflow.plan.memory import suggest_others
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows, read_rows
from expertflow.train.device import apply_switches, is_out_of_memory
from expertflow.train.feed.batches import Rows
from expertflow.train.feed.loader import BaseFeed, Feed, make_feed
from expertflow.train.memory import memory_advice
from expertflow.train.model.attention import activate_flash_3, caps_scores, describe_route
from expertflow.train.model.compiled import FAILURES, compile_layers, describe_compilation
from expertflow.train.model.load import DTYPES, describe_weights, load_for_training
from expertflow.train.model.loss import loss_and_gradient_to_compile, loss_route
from expertflow.train.model.packed import PackedLoss, causal_lm, find_head
from expertflow.train.model.self_check import MixedDocuments, check_model
from expertflow.train.model.start_check import Route, check_route
from expertflow.train.optimizers import make_optimizer
from expertflow.train.processes import Processes, wrap_model
from expertflow.train.records import Fallback
from expertflow.train.run import TrainingRun, TrainInputs, TrainProgress
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.timing import Clock

log = logging.getLogger(__name__)
# Elsewhere all kernels in use are already tried by other software.
CHECKED_DEVICES = ("cuda",)


def assemble_run(
    inputs: TrainInputs,
    *,
    processes: Processes,
    saver: Saver,
    stop: Callable[[], bool],
    directory: Path | None,
) -> TrainingRun:
    plan, model = inputs.plan, inputs.model
    cuda = processes.device.type == "cuda"
    progress, clock = _progress(inputs, directory, cuda=cuda)
    feed, held_out, data = _data(inputs, processes)
    words = [*apply_switches(plan, processes.device), data]
    # The same seed in all processes: they draw the same new adapter weights.
    torch.manual_seed(plan.seed)
    try:
        net = load_for_training(plan, model, processes.device, weights=inputs.weights)
        words.append(describe_weights(net, plan))
        loss, route, more = prepare_loss(net, plan, processes, feed, progress)
        wrapped = wrap_model(loss, plan)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
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


def _progress(
    inputs: TrainInputs, directory: Path | None, *, cuda: bool
) -> tuple[TrainProgress, Clock]:
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
    return progress, Clock(earlier, since_process_start=since_start, cuda=cuda)


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


def prepare_loss(
    net: Any, plan: TrainPlan, processes: Processes, feed: BaseFeed, progress: TrainProgress
) -> tuple[PackedLoss, Route, list[str]]:
    """Return the loss on a checked route, the route, and descriptions; note its fallbacks.

    A resumed run starts from its earlier fallbacks. Raises TrainingError if no route can train this
    model.
    """
    device, dtype, smoothing = processes.device, DTYPES[plan.precision], plan.label_smoothing_factor
    loss = PackedLoss(net, label_smoothing=smoothing)
    flash = activate_flash_3(device) if device.type == "cuda" else "no CUDA kernels"
    words: list[str] = []
    if plan.torch_compile:
        words += filter(None, [compile_layers(net, dtype=dtype, mode=plan.torch_compile_mode)])
        loss.kernel = torch.compile(loss_and_gradient_to_compile)
    else:
        words.append("compilation off")
    route = Route(loss, attention=plan.attention, compiled=plan.torch_compile)
    for fallback in progress.fallbacks:
        route.start_from(fallback.part, fallback.used)
    # Rejects attention that cannot run here, before anything runs.
    caps = caps_scores(causal_lm(net).config)
    describe_route(route.used["attention"], device=device, dtype=dtype, caps=caps)
    is_checked = device.type in CHECKED_DEVICES
    checked = None
    try:
        checked = _check_model(loss, processes)
    except MixedDocuments:
        # On a card, the route check may still find attention that separates them.
        if not is_checked:
            raise
    if is_checked:
        n_before = len(progress.fallbacks)
        words.append(_check_route(loss, route, plan, processes, feed, progress))
        if checked is None or len(progress.fallbacks) > n_before:
            checked = _check_model(loss, processes)
    kernel = describe_route(route.used["attention"], device=device, dtype=dtype, caps=caps)
    head = loss_route(find_head(causal_lm(net)), label_smoothing=smoothing)
    words = [
        f"attention {route.used['attention']}: {kernel}; {flash}",
        f"loss {route.used['loss']}: {head}",
        str(checked),
        *words,
    ]
    return loss, route, words


def _check_model(loss: PackedLoss, processes: Processes) -> str:
    with processes.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
        return check_model(loss)


def _check_route(
    loss: PackedLoss,
    route: Route,
    plan: TrainPlan,
    processes: Processes,
    feed: BaseFeed,
    progress: TrainProgress,
) -> str:
    if plan.method == "full" and plan.parallel == "fsdp":
        return "route not checked: the gradients of all weights may not fit on one card"
    planned = dict(route.used)
    collator, _ = feed.step_rows(0)
    rows = feed.micro_batches(0)[0]
    most = int(np.argmax(collator.n_targets_N[rows]))
    try:
        found, words = check_route(
            loss,
            route,
            collator.batch(rows[most : most + 1]),
            autocast=processes.accelerator.autocast,
            any_of=processes.any_of,
            after_step=progress.step,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        for part, choice in planned.items():
            route.use(part, choice)
        log.warning("the route was not checked: %s", single_line(error, 200))
        return "route not checked: memory ran out"
    for fallback in found:
        _note_fallback(progress, fallback)
    if found:
        used = ", ".join(f"{f.part} {f.used}" for f in found)
        return f"route checked: {used}: {words}"
    return f"route checked: a row's loss and gradients match the plain route's: {words}"


def _note_fallback(progress: TrainProgress, fallback: Fallback) -> None:
    progress.fallbacks += (fallback,)
    log.warning(
        "%s %s falls back to %s: %s",
        fallback.part, fallback.planned, fallback.used, fallback.reason,
    )  # fmt: skip


def try_batches(run: TrainingRun, n_steps: int = 1) -> None:
    """Run and discard what may fail: the longest micro-batch, or each shape of the next steps.

    Rows that are cut to the longest of their batch differ in length: if the longest ones do not
    fit, the run fails at once. If compiling fails, it continues uncompiled.
    """
    feed, step, is_compiled = run.feed, run.progress.step, run.route.used["compilation"] == "on"
    collator, _ = feed.step_rows(step)
    tried: dict[int, Rows] = {}
    if isinstance(feed, Feed) and collator.cuts:
        tried[0] = np.argsort(-collator.n_tokens_N, kind="stable")[: feed.micro_batch_size]
    elif is_compiled:
        # Equally many in all processes, which a sharded model requires.
        most = None if run.plan.world_size == 1 else 1
        for number in range(step, min(step + n_steps, feed.n_steps)):
            for rows in feed.micro_batches(number)[:most]:
                tried.setdefault(len(rows), rows)
    devices, reason = [run.device] if run.device.type == "cuda" else [], None
    # DDP could not continue after a failed forward or backward pass.
    module = getattr(run.loss, "module", run.loss)
    clear_gradients(run)
    try:
        with torch.random.fork_rng(devices), memory_advice(run.plan, run.device):
            for rows in tried.values():
                with run.processes.accelerator.autocast():
                    loss = module(collator.batch(rows))
                run.processes.accelerator.backward(loss)
                clear_gradients(run)
    except FAILURES as error:
        if not is_compiled:
            raise
        reason = f"it fails: {single_line(error, 300)}"
        clear_gradients(run)
    if is_compiled and run.processes.any_of(reason is not None)[0]:
        run.route.use("compilation", "off")
        fallback = Fallback(
            part="compilation",
            planned="on",
            used="off",
            reason=reason or "it fails in another process",
            after_step=step,
        )
        _note_fallback(run.progress, fallback)
        try_batches(run)


def clear_gradients(run: TrainingRun) -> None:
    """Free the gradients, or zero them if layers run as CUDA graphs.

    A gradient made by a graph would be overwritten by the next micro-batch's.
    """
    is_kept = run.plan.torch_compile_mode == "reduce-overhead"
    run.optimizer.zero_grad(set_to_none=not is_kept)
    if is_kept:
        for parameter in (p for group in run.optimizer.param_groups for p in group["params"]):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def note_compilation(run: TrainingRun) -> None:
    """Add what was compiled to the run's activated features; call after the first step."""
    if run.plan.torch_compile:
        run.activated += (f"{describe_compilation()}, by the end of step {run.progress.step}",)
        log.info("%s", run.activated[-1])
