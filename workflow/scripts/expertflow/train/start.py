"""Choose a run's route before its first step: load the loss, check it, fall back where it fails."""

import logging
from typing import Any

import numpy as np
import torch

from expertflow.core.errors import single_line
from expertflow.plan.records import TrainPlan
from expertflow.train.device import is_out_of_memory
from expertflow.train.feed.batches import Batch
from expertflow.train.feed.loader import BaseFeed
from expertflow.train.model.attention import activate_flash_3, caps_scores, describe_route
from expertflow.train.model.compiled import compile_layers
from expertflow.train.model.load import DTYPES
from expertflow.train.model.loss import loss_and_gradient_to_compile, loss_route
from expertflow.train.model.packed import PackedLoss, causal_lm, find_head
from expertflow.train.model.self_check import MixedDocuments, check_model
from expertflow.train.model.start_check import Route, check_route
from expertflow.train.processes import Processes
from expertflow.train.records import Fallback

log = logging.getLogger(__name__)
# Elsewhere all kernels in use are already tried by other software.
CHECKED_DEVICES = ("cuda",)


def prepare_loss(
    net: Any,
    plan: TrainPlan,
    processes: Processes,
    feed: BaseFeed,
    *,
    step: int,
    earlier: tuple[Fallback, ...] = (),
) -> tuple[PackedLoss, Route, tuple[Fallback, ...], list[str]]:
    """Return the loss on a checked route, the route, its fallbacks, and descriptions.

    A resumed run starts from its ``earlier`` fallbacks. Raises TrainingError if no route can train
    this model.
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
    for fallback in earlier:
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
    found: tuple[Fallback, ...] = ()
    if is_checked:
        found, outcome = _check_route(loss, route, plan, processes, feed, step=step)
        words.append(outcome)
        if found or checked is None:
            checked = _check_model(loss, processes)
    kernel = describe_route(route.used["attention"], device=device, dtype=dtype, caps=caps)
    head = loss_route(find_head(causal_lm(net)), label_smoothing=smoothing)
    words = [
        f"attention {route.used['attention']}: {kernel}; {flash}",
        f"loss {route.used['loss']}: {head}",
        str(checked),
        *words,
    ]
    return loss, route, earlier + found, words


def _check_model(loss: PackedLoss, processes: Processes) -> str:
    with processes.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
        return check_model(loss)


def _check_route(
    loss: PackedLoss,
    route: Route,
    plan: TrainPlan,
    processes: Processes,
    feed: BaseFeed,
    *,
    step: int,
) -> tuple[tuple[Fallback, ...], str]:
    if plan.method == "full" and plan.parallel == "fsdp":
        return (), "route not checked: the gradients of all weights may not fit on one card"
    planned = dict(route.used)
    try:
        found, words = check_route(
            loss,
            route,
            _row_with_most_targets(feed),
            autocast=processes.accelerator.autocast,
            any_of=processes.any_of,
            after_step=step,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        for part, choice in planned.items():
            route.use(part, choice)
        log.warning("the route was not checked: %s", single_line(error, 200))
        return (), "route not checked: memory ran out"
    for fallback in found:
        warn_of(fallback)
    if found:
        used = ", ".join(f"{f.part} {f.used}" for f in found)
        return found, f"route checked: {used}: {words}"
    return (), f"route checked: a row's loss and gradients match the plain route's: {words}"


def warn_of(fallback: Fallback) -> None:
    log.warning(
        "%s %s falls back to %s: %s",
        fallback.part, fallback.planned, fallback.used, fallback.reason,
    )  # fmt: skip


def _row_with_most_targets(feed: BaseFeed) -> Batch:
    collator, _ = feed.step_rows(0)
    rows = feed.micro_batches(0)[0]
    most = int(np.argmax(collator.n_targets_N[rows]))
    return collator.batch(rows[most : most + 1])
