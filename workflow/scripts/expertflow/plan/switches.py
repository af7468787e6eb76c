"""Choose precision, attention, compilation and what several processes do, each with its reason."""

from expertflow.core.errors import ConfigError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import (
    Attention,
    PlanSpec,
    Precision,
    Reason,
    TrainPlan,
    make_reason,
)


def choose_precision(
    spec: PlanSpec, gpu: GpuFacts | None, *, by_hand: bool = False
) -> tuple[Precision, Reason]:
    """Resolve what products are computed in: what was asked for, where the card has it.

    A CPU trains in half precision only where that is asked for ``by_hand``.
    """
    value: Precision
    if gpu is None and not by_hand:
        value, reason = "fp32", "the CPU trains in full precision"
    elif spec.bf16 and gpu and gpu.peak_bf16_flops_per_s is None and gpu.peak_fp16_flops_per_s:
        value, reason = "fp16", f"bf16 was asked for and {gpu.name} has none; fp16 with a scaler"
    elif spec.bf16:
        value, reason = "bf16", spec.told("bf16")
    elif spec.fp16:
        value, reason = "fp16", f"{spec.told('fp16')}, with a loss scaler"
    else:
        value, reason = "fp32", "neither bf16 nor fp16 is set"
    return value, make_reason("precision", value, reason)


def choose_tf32(spec: PlanSpec, gpu: GpuFacts | None) -> tuple[bool, Reason]:
    """Resolve whether fp32 products are rounded to TF32, where the card can."""
    value = spec.use_tf32 and gpu is not None and gpu.peak_tf32_flops_per_s is not None
    if gpu is None:
        reason = "TF32 is a mode of CUDA cards, and this plan trains on a CPU"
    elif gpu.peak_tf32_flops_per_s is None:
        reason = f"{gpu.name} has no TF32 (compute capability {gpu.compute_capability})"
    else:
        reason = spec.told("use_tf32")
    return value, make_reason("use_tf32", value, reason)


def choose_attention(spec: PlanSpec, gpu: GpuFacts | None) -> tuple[Attention, Reason]:
    """Resolve the attention route.

    Raises:
        ConfigError: the kernel that is insisted on does not run on a CPU.
    """
    value: Attention
    if spec.attention is not None:
        value, reason = spec.attention, spec.told("attention")
    elif not spec.use_sdpa:
        value, reason = "eager", "use_sdpa is false"
    else:
        value, reason = "packed", "documents of a row are isolated by their lengths"
    if value == "varlen" and gpu is None:
        raise ConfigError("training.attention varlen needs a CUDA card; use auto, or sdpa")
    return value, make_reason("attention", value, reason)


def choose_compile(
    spec: PlanSpec, gpu: GpuFacts | None, *, attention: Attention, packing: str
) -> tuple[bool, Reason]:
    """Compile the layers where shapes are fixed and the card is worth it."""
    if spec.torch_compile is not None:
        value, reason = spec.torch_compile, spec.told("torch_compile")
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
    return value, make_reason("torch_compile", value, reason)


def check_parallel(spec: PlanSpec | TrainPlan, name: str = "training.parallel") -> Reason:
    """Say what the processes share; ``name`` is what the user knows the setting by.

    Raises:
        ConfigError: 4-bit weights and 8-bit moments cannot be shared out.
    """
    if spec.world_size == 1:
        return make_reason("parallel", "none", "world_size is 1")
    if spec.parallel == "fsdp" and spec.method == "qlora":
        raise ConfigError(f"{name} fsdp cannot share out 4-bit weights; use ddp")
    if spec.parallel == "fsdp" and spec.optim == "adamw_8bit":
        raise ConfigError(
            f"{name} fsdp cannot share out the states of optim adamw_8bit; use adamw_torch_fused"
        )
    held = {"ddp": "each process holds the whole model", "fsdp": "each process holds a share"}
    return make_reason(
        "parallel", spec.parallel, f"{spec.world_size} processes; {held[spec.parallel]}"
    )
