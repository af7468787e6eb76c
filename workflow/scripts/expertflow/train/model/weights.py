"""The trained parameters of a model and their optimizer states, saved and restored by name.

A parameter may be sharded over processes (``fully_shard``); these functions return full tensors.
Gathering is a collective: every rank calls, in the same order.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from expertflow.core.errors import TrainingError

Copy = Callable[[torch.Tensor], torch.Tensor]


class Diverged(TrainingError):
    """A loss or weight is not finite, or the loss has exploded; a retry would repeat it."""


def list_trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name; a tied one appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full tensor on its device, sharing memory unless it was sharded."""
    tensor = tensor.detach()
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.contiguous()


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    # Every rank has the full tensor, so nothing is sent.
    shards = distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    own: torch.Tensor = shards.clone()
    return own


def trainable_state(model: Any, copy: Copy = torch.Tensor.cpu) -> dict[str, torch.Tensor]:
    """Return the full trained parameters by name, passed one by one through ``copy``."""
    return {name: copy(gather_full(p)) for name, p in list_trained_parameters(model).items()}


def load_trainable_state(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    parameters = list_trained_parameters(model)
    for name in sorted({*parameters, *state}):
        saved, here = (_words(t[name]) if name in t else "missing" for t in (state, parameters))
        # copy_ would cast another type and broadcast another shape.
        if saved != here:
            raise TrainingError(
                f"parameter {name} is {saved} in the saved state and {here} in the trained model;"
                " remove the state and start again"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(state[name], parameter))


def optimizer_state(
    optimizer: Any, model: Any, copy: Copy = torch.Tensor.cpu
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return the optimizer's full tensors, through ``copy``, and numbers as ``parameter/key``."""
    states, parameters = unwrap_optimizer(optimizer).state, list_trained_parameters(model)
    if lost := len(set(states) - set(parameters.values())):
        raise TrainingError(
            f"the optimizer has states of {lost} parameters that the model does not list;"
            " nothing was saved; report this as a bug, with the log"
        )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, object] = {}
    scalars: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in states.get(parameter, {}).items():
            # bitsandbytes counts its steps in a Python number, torch in a 0-dimensional tensor.
            if not isinstance(value, torch.Tensor):
                values[f"{name}/{key}"] = value
            elif value.dim() == 0:
                scalars[f"{name}/{key}"] = value
            else:
                tensors[f"{name}/{key}"] = copy(gather_full(value))
    if scalars:
        # One device synchronization instead of one per parameter.
        numbers = torch.stack([value.detach().float() for value in scalars.values()]).tolist()
        values.update(zip(scalars, numbers, strict=True))
    return tensors, values


def load_optimizer_state(
    optimizer: Any, model: Any, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> None:
    """Load full tensors and numbers; a float was a torch tensor, any other number was not."""
    optimizer, parameters = unwrap_optimizer(optimizer), list_trained_parameters(model)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for key, value in {**tensors, **values}.items():
        name, _, what = key.rpartition("/")
        parameter = parameters[name]
        # A fused optimizer expects its step count on the device, any other on the host.
        if isinstance(value, float):
            group = groups[parameter]
            on_device = group.get("fused") or group.get("capturable")
            place = parameter.device if on_device else "cpu"
            value = torch.tensor(value, dtype=torch.float32, device=place)
        elif isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            value = shard_like(value, parameter)
        elif isinstance(value, torch.Tensor):
            value = value.to(parameter.device, copy=True)
        optimizer.state[parameter][what] = value


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, without the wrapper for a loss scaler."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def first_not_finite(model: Any) -> str | None:
    """Return the first trained parameter with a NaN or infinity, the same on every rank."""
    parameters = list_trained_parameters(model)
    extremes = torch.stack([_extremes(p.detach()) for p in parameters.values()])
    bad = (~extremes.isfinite()).any(1).to(torch.int32)
    if any(isinstance(p, DTensor) for p in parameters.values()):
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return next(
        (name for name, is_bad in zip(parameters, bad.tolist(), strict=True) if is_bad), None
    )


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A process may have no rows of a short parameter, and aminmax rejects an empty one.
    if not part.numel():
        return torch.zeros(2, device=part.device)
    # A NaN anywhere makes both extremes NaN, so one pass finds it and both infinities.
    return torch.stack(torch.aminmax(part)).float()


def weights_sha256(model: Any) -> str:
    """Hash all trained parameters bit by bit, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(list_trained_parameters(model).items()):
        digest.update(name.encode())
        # As bytes, since numpy has no bf16.
        digest.update(gather_full(parameter).cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
