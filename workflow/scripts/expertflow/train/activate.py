"""Turn on what the plan says, and say each switch in words."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from expertflow.core.process import noted_signals
from expertflow.plan.records import TrainPlan

ON_OFF = {True: "on", False: "off"}


def activate(plan: TrainPlan, device: torch.device) -> tuple[str, ...]:
    """Set threads and precision switches; say what is on."""
    if plan.n_threads is not None:
        torch.set_num_threads(plan.n_threads)
    torch.backends.cuda.matmul.allow_tf32 = plan.use_tf32
    if plan.deterministic:
        fix_workspaces()
        # Not warn_only: with it, FlashAttention's backward pass only warns and stays as it was.
        torch.use_deterministic_algorithms(True)
    return (
        f"device {device.type}, {torch.get_num_threads()} threads",
        f"processes {plan.world_size}" + (f", {plan.parallel}" if plan.world_size > 1 else ""),
        f"dtype {plan.precision}" + (" with a loss scaler" if plan.precision == "fp16" else ""),
        f"TF32 {ON_OFF[plan.use_tf32]}",
        f"activation checkpointing {ON_OFF[plan.gradient_checkpointing]}",
        f"optimizer {plan.optim}",
        f"schedule {plan.lr_scheduler_type}, {plan.n_warmup_steps} warm-up steps",
        f"deterministic kernels {ON_OFF[plan.deterministic]}",
        f"loader {_loader_words(plan)}",
    )


def fix_workspaces() -> None:
    """Let the products of a card give the same bits every time, in this process.

    Before its very first product: torch looks once, and refuses all later ones under deterministic
    kernels where it was not set by then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _loader_words(plan: TrainPlan) -> str:
    ahead = plan.dataloader_prefetch_factor
    if plan.loader == "thread":
        return f"thread, prefetch {ahead}"
    if not plan.dataloader_num_workers:
        return "in the trainer, no workers"
    kept = ", kept from epoch to epoch" if plan.dataloader_persistent_workers else ""
    return f"{plan.dataloader_num_workers} workers, prefetch {ahead} each{kept}"


@contextmanager
def catching_signals() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM, SIGINT and SIGHUP end the run after the current step; tell if one came.

    A SIGHUP that the caller has ignored (``nohup``) stays ignored.
    """
    with noted_signals(ignorable=[signal.SIGHUP]) as came:
        yield lambda: bool(came)
