"""Optimizers and learning-rate schedules by their names in a manifest.

A new one needs only a table entry: the manifest's schema, the trainer's flags, the predicted memory
and the packages checked before a run follow from it. Since the plan reads these tables too, torch
is imported only where an optimizer is built.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from expertflow.core.errors import TrainingError

if TYPE_CHECKING:
    import torch

    from expertflow.plan.records import TrainPlan
    from expertflow.plan.settings import Training

BITSANDBYTES = "envs/requirements-bitsandbytes.lock"
Groups = list[dict[str, Any]]


class OptimizerSpec(NamedTuple):
    """How to build an optimizer for parameter groups, and what a plan must know about it.

    ``state_bytes``: its bytes per trained parameter in fp32, half of which it takes in bf16 unless
    its states ``have_own_dtype``. ``package``: what it needs besides torch.
    ``is_shardable``: whether its states can be divided among processes (fsdp).
    """

    build: Callable[[Groups, "TrainPlan"], "torch.optim.Optimizer"]
    state_bytes: int
    have_own_dtype: bool = False
    package: str | None = None
    is_shardable: bool = True


def _adamw(groups: Groups, plan: "TrainPlan", *, fused: bool = False) -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(groups, fused=fused, **_adam_settings(plan))


def _adamw_8bit(groups: Groups, plan: "TrainPlan") -> "torch.optim.Optimizer":
    try:
        package = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise TrainingError(
            f"training.optim adamw_8bit needs bitsandbytes ({error}); pip install"
            f" -r {BITSANDBYTES}, or set training.optim to adamw_torch_fused"
        ) from error
    optimizer: torch.optim.Optimizer = package.optim.AdamW8bit(groups, **_adam_settings(plan))
    return optimizer


def _adam_settings(plan: "TrainPlan") -> dict[str, Any]:
    betas = (plan.adam_beta1, plan.adam_beta2)
    return {"lr": plan.learning_rate, "betas": betas, "eps": plan.adam_epsilon}


OPTIMIZERS = {
    "adamw_torch_fused": OptimizerSpec(partial(_adamw, fused=True), state_bytes=8),
    "adamw_torch": OptimizerSpec(_adamw, state_bytes=8),
    "adamw_8bit": OptimizerSpec(
        _adamw_8bit, state_bytes=2, have_own_dtype=True, package="bitsandbytes", is_shardable=False
    ),
}


def state_bytes(settings: "Training") -> int:
    """Return the optimizer's bytes per trained parameter."""
    spec = OPTIMIZERS[settings.optim]
    return spec.state_bytes // (2 if settings.pure_bf16 and not spec.have_own_dtype else 1)


def _progress(plan: "TrainPlan", step: int) -> float:
    return (step - plan.n_warmup_steps) / max(1, plan.n_steps - plan.n_warmup_steps)


def _cosine(plan: "TrainPlan", step: int) -> float:
    return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * _progress(plan, step)))


def _stable_decay(plan: "TrainPlan", step: int) -> float:
    n_left = plan.n_steps - step
    if n_left > plan.n_decay_steps:
        return plan.learning_rate
    # With 10 steps and 4 of decay, steps 0 to 5 take the peak and 6 to 9 take 4/4, 3/4, 2/4, 1/4.
    return plan.learning_rate * n_left / plan.n_decay_steps


# The rate of a step, counted from 0, after the warm-up; a decay reaches 0 at step ``n_steps``.
SCHEDULES: dict[str, Callable[["TrainPlan", int], float]] = {
    "cosine": _cosine,
    "linear": lambda plan, step: plan.learning_rate * (1 - _progress(plan, step)),
    "constant_with_warmup": lambda plan, _step: plan.learning_rate,
    "warmup_stable_decay": _stable_decay,
}


def make_optimizer(model: Any, plan: "TrainPlan") -> "torch.optim.Optimizer":
    """Build the plan's optimizer, after ``fully_shard``; vectors (norms, biases) never decay."""
    decayed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # DoRA's magnitudes are scales like a norm's, although on embeddings they are a matrix.
            is_vector = parameter.dim() < 2 or "lora_magnitude_vector" in name
            (others if is_vector else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": plan.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[plan.optim].build([group for group in groups if group["params"]], plan)


def learning_rate(step: int, plan: "TrainPlan") -> float:
    """Return the rate of a step, counted from 0; the warm-up is linear and begins above 0."""
    if step < plan.n_warmup_steps:
        return plan.learning_rate * (step + 1) / plan.n_warmup_steps
    return SCHEDULES[plan.lr_scheduler_type](plan, step)
