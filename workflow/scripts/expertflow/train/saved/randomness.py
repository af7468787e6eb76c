"""The states of all processes' random-number generators, as tensors; put back, or started anew."""

import math
import random

import torch
import torch.distributed as dist

from expertflow.core.files import sha256_text

PREFIX = "random/"


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Give the states of torch's, Python's and the device's generator, one row a rank.

    A collective where there are several processes.
    """
    _, internal, gauss = random.getstate()
    # 32-bit integers, which float64 holds exactly.
    numbers = [*internal, math.nan if gauss is None else gauss]
    own = {"torch": torch.get_rng_state(), "python": torch.tensor(numbers, dtype=torch.float64)}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {PREFIX + kind: _all_ranks(state, device) for kind, state in own.items()}


def _all_ranks(own: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not dist.is_initialized():
        return own[None].clone()
    own = own.to(device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows).cpu()


def put_random_states(states: dict[str, torch.Tensor], *, rank: int, device: torch.device) -> None:
    """Set this process' generators to what they were."""
    torch.set_rng_state(states[PREFIX + "torch"][rank].clone())
    *internal, gauss = states[PREFIX + "python"][rank].tolist()
    random.setstate((3, tuple(map(int, internal)), None if math.isnan(gauss) else gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[PREFIX + "cuda"][rank].clone(), device)


def reseed(*, seed: int, step: int, rank: int) -> None:
    """Start this process' generators anew, elsewhere for every seed, step and rank."""
    number = int(sha256_text(f"{seed} {step} {rank}")[:15], 16)
    torch.manual_seed(number)
    random.seed(number)
