"""Optimizer and learning-rate schedule by manifest name; optimizer state by parameter name.

State keys are ``"<parameter>/<what>"``; tensors and plain numbers are kept separately.
"""

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from expertflow.core.errors import TrainingError
from expertflow.plan.records import TrainPlan
from expertflow.train.model.load import BITSANDBYTES
from expertflow.train.model.weights import Copy, distributed, gathered, trained_parameters


def make_optimizer(model: Any, plan: TrainPlan) -> torch.optim.Optimizer:
    """Make AdamW, after ``fully_shard``; norms, biases and other vectors get no weight decay.

    Raises TrainingError for 8-bit AdamW without its package or on sharded parameters.
    """
    decayed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in trained_parameters(model).items():
        # DoRA's magnitudes are scales like a norm's, although stored as a matrix on embeddings.
        is_vector = parameter.dim() < 2 or "lora_magnitude_vector" in name
        (others if is_vector else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": plan.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": plan.learning_rate,
        "betas": (plan.adam_beta1, plan.adam_beta2),
        "eps": plan.adam_epsilon,
    }
    if plan.optim != "adamw_8bit":
        return torch.optim.AdamW(groups, fused=plan.optim == "adamw_torch_fused", **settings)
    if any(isinstance(p, DTensor) for group in groups for p in group["params"]):
        raise TrainingError(
            "training.optim adamw_8bit does not work on sharded parameters (training.parallel"
            " fsdp); set training.optim to adamw_torch_fused, or training.parallel to ddp"
        )
    try:
        package = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise TrainingError(
            f"training.optim adamw_8bit needs bitsandbytes ({error}); pip install"
            f" -r {BITSANDBYTES}, or set training.optim to adamw_torch_fused"
        ) from error
    optimizer: torch.optim.Optimizer = package.optim.AdamW8bit(groups, **settings)
    return optimizer


def learning_rate(step: int, plan: TrainPlan) -> float:
    """Return the learning rate of a step counted from 0; decays reach 0 at step ``n_steps``."""
    warmup, total = plan.n_warmup_steps, plan.n_steps
    if step < warmup:
        return plan.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    if plan.lr_scheduler_type == "cosine":
        return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if plan.lr_scheduler_type == "linear":
        return plan.learning_rate * (1 - progress)
    if plan.lr_scheduler_type == "warmup_stable_decay" and step >= total - plan.n_decay_steps:
        return plan.learning_rate * (total - step) / plan.n_decay_steps
    return plan.learning_rate


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: Any, copy: Copy = torch.Tensor.cpu
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state by parameter name: full tensors through ``copy``, and numbers.

    A collective if parameters are sharded.
    """
    own, parameters = _unwrapped(optimizer), trained_parameters(model)
    if lost := len(set(own.state) - set(parameters.values())):
        raise TrainingError(
            f"the optimizer holds the states of {lost} parameters that the model does not show;"
            " nothing was saved; report this as a fault, with the log"
        )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    scalars: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in own.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                values[f"{name}/{key}"] = value
            elif value.dim() == 0:
                scalars[f"{name}/{key}"] = value
            else:
                tensors[f"{name}/{key}"] = copy(gathered(value))
    if scalars:
        # One device synchronization instead of one per parameter.
        numbers = torch.stack([value.detach() for value in scalars.values()]).tolist()
        values.update(zip(scalars, numbers, strict=True))
    return tensors, values


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
) -> None:
    optimizer = _unwrapped(optimizer)
    parameters = trained_parameters(model)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for key in (*tensors, *values):
        name, _, what = key.rpartition("/")
        if name not in parameters or what not in _known(optimizer):
            raise TrainingError(
                f"the saved state holds {key}, which this run's optimizer"
                f" ({type(optimizer).__name__}) does not know; remove the state and start again"
            )
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if key in values:
            state[what] = _number(values[key], optimizer, groups[parameter], parameter)
        elif tensors[key].shape == parameter.shape:
            state[what] = distributed(tensors[key], parameter)
        else:
            state[what] = tensors[key].to(parameter.device, copy=True)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _known(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    if isinstance(optimizer, torch.optim.AdamW):
        return frozenset({"step", "exp_avg", "exp_avg_sq"})
    return frozenset(
        {"step", *(f"{part}{i}" for part in ("state", "qmap", "absmax") for i in (1, 2))}
    )


def _number(
    value: Any, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Any:
    if not isinstance(optimizer, torch.optim.AdamW):
        return value
    on_device = group["fused"] or group["capturable"]
    return torch.tensor(
        float(value), dtype=torch.float32, device=parameter.device if on_device else "cpu"
    )
