"""Look at the machine just before training: what a plan, made elsewhere, could not know.

These readings change from minute to minute, so they lie outside every fingerprint.
"""

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from expertflow.core.errors import HardwareError
from expertflow.hardware.probe import usable_cpus
from expertflow.plan.records import TrainPlan

# Oldest releases that earlier set-ups ran with; torch: the oldest whose attention kernel we know.
FLOORS = {"transformers": "4.43.3", "accelerate": "1.11.0", "datasets": "4.3.0", "torch": "2.11"}
STATE_BYTES_PER_TRAINED_PARAMETER = 12


def preflight(plan: TrainPlan, state: Path) -> dict[str, Any]:
    """Check disk, device and versions; give the readings.

    Raises:
        HardwareError: the checkpoints will not fit the disk, the card is missing, or a package is
            too old.
    """
    state.mkdir(parents=True, exist_ok=True)
    free_disk = shutil.disk_usage(state).free
    # A run that is resumed has some of its checkpoints already.
    there = sum(f.stat().st_size for f in state.glob("checkpoints/*/*"))
    one = plan.n_params_trainable * STATE_BYTES_PER_TRAINED_PARAMETER
    # The newest ones, the best, the one that is being written, and the model.
    needed = one * (plan.save_total_limit + 3)
    if free_disk + there < needed:
        raise HardwareError(
            f"{state}: {free_disk / 1e9:.1f} GB free and {needed / 1e9:.1f} GB needed for"
            f" {plan.save_total_limit + 2} checkpoints and the model; free some, or lower"
            " training.save_total_limit"
        )
    if plan.gpu is not None and not torch.cuda.is_available():
        raise HardwareError(
            f"the plan is for {plan.gpu.name} and torch sees no CUDA device; run on that machine,"
            " or plan with hardware=cpu"
        )
    found = versions() | _optional(plan)
    for name, floor in FLOORS.items():
        if _numbers(found[name]) < _numbers(floor):
            raise HardwareError(f"{name} {found[name]} is older than {floor}; upgrade it")
    return {
        "free_disk_bytes": free_disk,
        "needed_disk_bytes": needed,
        "free_memory_bytes": psutil.virtual_memory().available,
        "n_cpus": usable_cpus(),
        "bf16_supported": torch.cuda.is_bf16_supported() if plan.gpu is not None else None,
        "tf32_supported": torch.cuda.get_device_capability() >= (8, 0)
        if plan.gpu is not None
        else None,
        "measured_peak_flops_per_s": None,
        "versions": found,
    }


def _optional(plan: TrainPlan) -> dict[str, str]:
    """Give the releases of packages that only some settings need.

    Raises:
        HardwareError: one of them is missing.
    """
    needs = {
        "bitsandbytes": plan.method == "qlora" or plan.optim == "adamw_8bit",
        "tensorboard": plan.report_to == "tensorboard",
        "wandb": plan.report_to == "wandb",
    }
    because = {
        "bitsandbytes": "method qlora and optim adamw_8bit need it; pip install -r"
        " envs/requirements-bitsandbytes.lock, or use method lora and optim adamw_torch_fused",
        "tensorboard": "pip install tensorboard, or set training.report_to to none",
        "wandb": "pip install wandb, or set training.report_to to none",
    }
    result = {}
    for name in (name for name, needed in needs.items() if needed):
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise HardwareError(f"package {name} is not installed; {because[name]}") from error
    return result


def versions() -> dict[str, str]:
    """Give the releases of the packages that decide a result."""
    names = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers")
    result = {}
    for name in names:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise HardwareError(f"package {name} is not installed; install envs/") from error
    return result


def _numbers(version: str) -> tuple[int, ...]:
    release = version.split("+")[0]
    return tuple(int(part) for part in release.split(".") if part.isdigit())
