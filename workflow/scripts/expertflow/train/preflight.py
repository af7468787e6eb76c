"""Check the machine just before training for what an earlier plan could not know.

These readings change from minute to minute, so no fingerprint includes them.
"""

import logging
import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from packaging.version import Version

from expertflow.core.disk import check_space
from expertflow.core.errors import HardwareError, single_line
from expertflow.core.format import gb
from expertflow.hardware.disk import measure_file
from expertflow.hardware.gpu_table import find_row
from expertflow.hardware.nvml import open_gpus
from expertflow.hardware.probe import (
    NO_CUDA,
    free_memory_bytes,
    least_free_gpu_memory,
    package_version,
    probe_machine,
    usable_cpus,
)
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import TrainPlan
from expertflow.plan.step_time import peak_flops_per_s
from expertflow.plan.switches import list_required_packages
from expertflow.train.device import fix_workspaces
from expertflow.train.memory import suggest_less
from expertflow.train.model.load import DTYPES
from expertflow.train.optimizers import state_bytes
from expertflow.train.timing import mark_time, seconds_between

log = logging.getLogger(__name__)
# Oldest releases known to work; for torch, the oldest with a supported attention kernel.
FLOORS = {"transformers": "5.23", "accelerate": "1.11.0", "datasets": "4.3.0", "torch": "2.11"}
# The driver takes seconds to free the memory of a killed training's processes.
DYING_S, POLL_S = 30.0, 0.5
# Large enough to saturate any current GPU; on two cores about 20 ms.
GPU_WIDTH, CPU_WIDTH = 8192, 1024
N_WARMUP, N_PRODUCTS, CPU_TIMED_S = 5, 20, 0.3
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers")


def run_preflight(
    plan: TrainPlan, state: Path, rows: Path | None = None, merged: tuple[Path, int] | None = None
) -> dict[str, object]:
    """Check disk, device and versions, and reject an impossible run; return the readings.

    ``rows`` is the file of training rows whose read speed is measured, ``merged`` the folder that
    the model is exported to and its bytes.
    """
    state.mkdir(parents=True, exist_ok=True)
    free_disk, needed_disk = _check_disk(plan, state, merged)
    gpu_name = free_gpu = None
    if plan.gpu is not None:
        gpu_name = _check_gpu(plan, plan.gpu)
        free_gpu = _check_gpu_memory(plan, plan.gpu)
        # Last, since it takes memory for CUDA itself.
        _try_gpu(gpu_name)
    found = _versions(plan)
    machine = probe_machine(table=_rows(plan.gpu))
    watched = [card["name"] for card in machine["gpus"][:1]]
    if gpu_name and watched not in ([], [gpu_name]):
        log.warning("the monitor watches %s, but training uses %s", *watched, gpu_name)
    speed, how = (None, "no file of rows given") if rows is None else measure_file(rows)
    return {
        "free_disk_bytes": free_disk,
        "needed_disk_bytes": needed_disk,
        "free_memory_bytes": free_memory_bytes(),
        "free_gpu_memory_bytes": free_gpu,
        "n_cpus": usable_cpus(),
        "gpu_name": gpu_name,
        "measured_peak_flops_per_s": _measured_peak(plan),
        "rows_read_bytes_per_s": speed,
        "rows_read_method": how,
        "machine": machine,
        "versions": found,
    }


def _check_gpu(plan: TrainPlan, gpu: GpuFacts) -> str:
    if not torch.cuda.is_available():
        raise HardwareError(_why_no_cuda(gpu))
    name = torch.cuda.get_device_name()
    if find_row(name, _rows(gpu)) is None:
        log.warning("the plan is for %s, but the card is %s", gpu.name, name)
    # Emulated bf16 is slower than fp32.
    if plan.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise HardwareError(
            f"the plan is for bf16 on {gpu.name}, but {name} lacks it; plan for this card with"
            " --config hardware=auto"
        )
    return name


def _try_gpu(name: str) -> None:
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability()
        raise HardwareError(
            f"torch {torch.__version__} cannot compute on {name} ({single_line(error, 90)}); use"
            f" one with kernels for compute capability {major}.{minor}, or see nvidia-smi -q for"
            " other processes and ECC errors"
        ) from error


def _why_no_cuda(gpu: GpuFacts) -> str:
    with open_gpus() as found:
        if not found.devices:
            return NO_CUDA.format(gpu.name)
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"found a card (driver {found.driver}), but torch {torch.__version__}, built {cuda},"
        " cannot use it; install a torch for this driver's CUDA, or a newer driver"
    )


def _check_disk(plan: TrainPlan, state: Path, merged: tuple[Path, int] | None) -> tuple[int, int]:
    free = shutil.disk_usage(state).free
    # A resumed run has some of its checkpoints already.
    there = sum(f.stat().st_size for f in state.glob("checkpoints/*/*"))
    weights = plan.n_params_trainable * DTYPES[plan.trained_dtype].itemsize
    # A checkpoint has trained weights and optimizer states, but no gradients.
    one = weights + plan.n_params_trainable * state_bytes(plan)
    # The newest ones, the best and the one being written; then the model, which counts as one more,
    # and the weights of the other candidates.
    needed = one * (plan.save_total_limit + 3) + weights * plan.save_total_limit
    limit = plan.save_total_limit
    needs = [(state, needed - there, f"{limit + 2} checkpoints and the weights of {limit + 1}")]
    if merged is not None:
        needs.append((*merged, "the merged model"))
        if state.stat().st_dev != merged[0].stat().st_dev:
            # On the same disk they are links.
            needs.append((merged[0], weights * (limit + 1), "the published weights"))
    check_space(needs, fix="free some, or lower training.save_total_limit")
    return free, needed


def _check_gpu_memory(plan: TrainPlan, gpu: GpuFacts) -> int:
    needed, end_s = plan.predicted_peak_bytes or 0, time.monotonic() + DYING_S
    # Waiting does not help if the card is smaller than the predicted peak.
    may_fit = needed <= (gpu.memory_total_bytes or needed)
    free, where = _free_gpu_memory(plan)
    while may_fit and needed > free and time.monotonic() < end_s:
        time.sleep(POLL_S)
        free, where = _free_gpu_memory(plan)
    if needed > free:
        if plan.may_halve_micro_batch:
            # It is only a prediction, and an out-of-memory run retries with a smaller micro-batch.
            log.warning("the plan needs %s of GPU memory; %s", gb(needed), where)
            return free
        raise HardwareError(
            f"the plan needs {gb(needed)} of GPU memory; {where}; stop what uses it, or"
            f" {suggest_less(plan)}"
        )
    return free


def _free_gpu_memory(plan: TrainPlan) -> tuple[int, str]:
    least = least_free_gpu_memory(plan.world_size)
    if least is not None:
        return least
    # The driver does not report it; torch asks CUDA, for this process's GPU only.
    free = torch.cuda.mem_get_info()[0]
    return free, f"the GPU has {gb(free)} free"


def _measured_peak(plan: TrainPlan) -> float | None:
    """Return the FLOP/s of a large product as the run computes it; null if the peak is known."""
    if peak_flops_per_s(plan.gpu, plan.precision, use_tf32=plan.use_tf32) is not None:
        return None
    # Training sets these switches later; the product must run under the same ones.
    if plan.deterministic:
        fix_workspaces()
    torch.backends.cuda.matmul.allow_tf32 = plan.use_tf32
    torch.set_num_threads(plan.n_threads or torch.get_num_threads())
    measured = measure_flops_per_s(DTYPES[plan.precision], cuda=plan.gpu is not None)
    # Return the product's memory to training.
    torch.cuda.empty_cache()
    return measured


def measure_flops_per_s(dtype: torch.dtype, *, cuda: bool) -> float:
    """Return the FLOP/s of a product of two square matrices: a GPU's median, a CPU's fastest.

    The data is random, since products of zeros draw less power and run at higher clocks. Other load
    can only slow a CPU down.
    """
    width, kind = (GPU_WIDTH, "cuda") if cuda else (CPU_WIDTH, "cpu")
    generator, shape = torch.Generator(kind).manual_seed(0), (width, width)
    left, right = (torch.randn(shape, generator=generator, device=kind).to(dtype) for _ in range(2))
    out, marks, start_s = torch.mm(left, right), [mark_time(cuda=cuda)], time.perf_counter()
    while len(marks) <= N_PRODUCTS and (cuda or time.perf_counter() < start_s + CPU_TIMED_S):
        torch.mm(left, right, out=out)
        marks.append(mark_time(cuda=cuda))
    if cuda:
        torch.cuda.synchronize()
    seconds = [seconds_between(a, b) for a, b in pairwise(marks)]
    # The first products of a GPU warm it up.
    return 2 * width**3 / (statistics.median(seconds[N_WARMUP:]) if cuda else min(seconds))


def _rows(gpu: GpuFacts | None) -> list[dict[str, object]]:
    if gpu is None:
        return []
    return [{"name": gpu.name, "driver_names": list(gpu.driver_names)}]


def _versions(plan: TrainPlan) -> dict[str, str]:
    needed = [*((name, "install envs/") for name in PACKAGES), *list_required_packages(plan)]
    found = {name: package_version(name, remedy) for name, remedy in needed}
    for name, floor in FLOORS.items():
        if Version(found[name]) < Version(floor):
            raise HardwareError(f"{name} {found[name]} is older than {floor}; upgrade it")
    return found
