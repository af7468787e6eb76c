"""The trained parameters of a model: read, put back, and named by a hash."""

import hashlib
from typing import Any

import torch

from expertflow.core.errors import TrainingError


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Give the trained parameters by name, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_trainable_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Copy trained parameters back.

    Raises:
        TrainingError: the names differ, so the state belongs to another model.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if set(parameters) != set(state):
        raise TrainingError("the saved state has other parameters than the model; remove the state")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def weights_sha256(model: Any) -> str:
    """Hash all trained parameters, bit by bit, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(trainable_state(model).items()):
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
