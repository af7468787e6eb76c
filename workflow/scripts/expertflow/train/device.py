"""Device switches, the speed of one large product, and out-of-memory detection."""

import os
import statistics
import time

import torch

from expertflow.plan.records import TrainPlan

ON_OFF = {True: "on", False: "off"}
# Large enough to saturate any current GPU.
MATMUL_WIDTH = 8192
N_WARMUP, N_TIMED = 5, 15
CPU_WIDTH, CPU_TIMED_S = 1024, 0.3  # about 20 ms per product on two cores
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


def measure_matmul_flops_per_s(dtype: torch.dtype) -> float:
    """Return the GPU's FLOP/s in the median product of two square matrices.

    The data is random, since products of zeros draw less power and run at higher clocks.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape = MATMUL_WIDTH, MATMUL_WIDTH
    left, right = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2)
    )
    out = torch.empty(shape, device="cuda", dtype=dtype)
    pairs = []
    for _ in range(N_WARMUP + N_TIMED):
        start = cuda_event()
        torch.mm(left, right, out=out)
        pairs.append((start, cuda_event()))
    torch.cuda.synchronize()
    seconds = (start.elapsed_time(end) / 1000 for start, end in pairs[N_WARMUP:])
    return float(2 * MATMUL_WIDTH**3 / statistics.median(seconds))


def cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def measure_cpu_flops_per_s(dtype: torch.dtype, n_threads: int | None) -> float:
    """Return the FLOP/s of the fastest product of two square matrices, with the run's threads.

    The fastest, because other load can only slow a product down.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads or before)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn((CPU_WIDTH, CPU_WIDTH), generator=generator).to(dtype) for _ in range(2)
    )
    out, best_s = torch.mm(left, right), float("inf")
    end_s = time.perf_counter() + CPU_TIMED_S
    while (start_s := time.perf_counter()) < end_s:
        torch.mm(left, right, out=out)
        best_s = min(best_s, time.perf_counter() - start_s)
    torch.set_num_threads(before)
    return 2 * CPU_WIDTH**3 / best_s
