"""Device switches and out-of-memory detection."""

import os

import torch

from expertflow.plan.records import TrainPlan

ON_OFF = {True: "on", False: "off"}
# Newer releases of torch use the second name.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Errors from allocations outside torch (cuBLAS, Triton, NCCL, CUDA loading a kernel): they ask the
# driver, which has nothing left once torch holds it all.
SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def apply_switches(plan: TrainPlan, device: torch.device) -> tuple[str, ...]:
    if plan.n_threads is not None:
        torch.set_num_threads(plan.n_threads)
    torch.backends.cuda.matmul.allow_tf32 = plan.use_tf32
    if plan.deterministic:
        fix_workspaces()
        # Not warn_only, which would leave FlashAttention's backward pass nondeterministic.
        torch.use_deterministic_algorithms(True)
    allocator = next((os.environ[name] for name in ALLOCATOR if name in os.environ), "default")
    return (
        f"device {device.type}, {torch.get_num_threads()} threads",
        f"processes {plan.world_size}" + (f", {plan.parallel}" if plan.world_size > 1 else ""),
        f"dtype {plan.precision}" + (" with a loss scaler" if plan.precision == "fp16" else ""),
        f"TF32 {ON_OFF[plan.use_tf32]}",
        f"activation checkpointing {ON_OFF[plan.gradient_checkpointing]}",
        f"optimizer {plan.optim}",
        f"schedule {plan.lr_scheduler_type}, {plan.n_warmup_steps} warm-up steps",
        f"deterministic kernels {ON_OFF[plan.deterministic]}",
        *([f"allocator {allocator}"] if device.type == "cuda" else []),
        f"loader {_describe_loader(plan)}",
    )


def configure_allocator() -> None:
    """Use expandable segments, unless the user set the allocator; call before CUDA starts."""
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def fix_workspaces() -> None:
    """Make GPU matrix products deterministic; call before the first, as torch reads it once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _describe_loader(plan: TrainPlan) -> str:
    ahead = plan.dataloader_prefetch_factor
    if plan.loader == "thread":
        return f"thread, prefetch {ahead}"
    if not plan.dataloader_num_workers:
        return "in the trainer, no workers"
    kept = ", kept between epochs" if plan.dataloader_persistent_workers else ""
    return f"{plan.dataloader_num_workers} workers, prefetch {ahead} each{kept}"


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in SHORTAGES)
