"""Choose attention, compilation and what several processes do, each with its reason."""

from typing import Literal

from expertflow.core.errors import ConfigError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import PlanSpec, Reason, TrainPlan

Attention = Literal["packed", "varlen", "sdpa", "flex", "eager"]


def choose_attention(spec: PlanSpec, gpu: GpuFacts | None) -> tuple[Attention, Reason]:
    """Resolve the attention route.

    Raises:
        ConfigError: the kernel that is insisted on does not run on a CPU.
    """
    value: Attention
    if spec.attention is not None:
        value, reason = spec.attention, "attention of the manifest"
    elif not spec.use_sdpa:
        value, reason = "eager", "use_sdpa is false"
    else:
        value, reason = "packed", "documents of a row are isolated by their lengths"
    if value == "varlen" and gpu is None:
        raise ConfigError("training.attention varlen needs a CUDA card; use auto, or sdpa")
    return value, _because("attention", value, reason)


def choose_compile(
    spec: PlanSpec, gpu: GpuFacts | None, *, attention: Attention, packing: str
) -> tuple[bool, Reason]:
    """Compile the layers where shapes are fixed and the card is worth it."""
    if spec.torch_compile is not None:
        value, reason = spec.torch_compile, "torch_compile of the manifest"
    elif gpu is None:
        value, reason = False, "the CPU gains less than compiling takes"
    elif packing == "none":
        value, reason = False, "unpacked rows are cut to many lengths, each to be compiled for"
    elif spec.method == "qlora":
        value, reason = False, "4-bit layers are not compiled"
    elif attention not in ("packed", "varlen"):
        value, reason = False, f"attention {attention} is there to compare with"
    else:
        value, reason = True, "all rows are of one length, so each kind of layer is compiled once"
    return value, _because("torch_compile", value, reason)


def check_parallel(spec: PlanSpec | TrainPlan, name: str = "training.parallel") -> Reason:
    """Say what the processes share; ``name`` is what the user knows the setting by.

    Raises:
        ConfigError: 4-bit weights cannot be shared out.
    """
    if spec.world_size == 1:
        return _because("parallel", "none", "world_size is 1")
    if spec.parallel == "fsdp" and spec.method == "qlora":
        raise ConfigError(f"{name} fsdp cannot share out 4-bit weights; use ddp")
    held = {"ddp": "each process holds the whole model", "fsdp": "each process holds a share"}
    return _because(
        "parallel", spec.parallel, f"{spec.world_size} processes; {held[spec.parallel]}"
    )


def _because(setting: str, value: object, reason: str) -> Reason:
    return Reason(setting=setting, value=str(value), because=reason)
