"""Make a CPU build of torch pose as one with a card, to see what the card would run.

On fake tensors (torch's ``FakeTensorMode``) the CUDA code path then runs: autocast, device checks,
the attention kernel's operator, the compiler down to a card's instructions. There are no values,
launches or allocator, and kernels do not check their arguments. It changes the process
permanently, so use a separate one.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expertflow.core.errors import TrainingError, single_line
from expertflow.core.files import replacing

SOURCE = Path(__file__).with_name("guard.cpp")
CAPABILITY = (9, 0)
SHARED_MEMORY_BYTES = 232448
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_multiprocessor=SHARED_MEMORY_BYTES + 1024,
    shared_memory_per_block_optin=SHARED_MEMORY_BYTES,
    shared_memory_per_block=49152,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    is_integrated=False,
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
    uuid="0",
)


def build_guard() -> Path:
    """Build the device guard for this torch, or find it in the user's cache.

    Raises TrainingError if there is no C++ compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise TrainingError("posing as a card needs a C++ compiler; install g++")
    spec = find_spec("torch")
    assert spec and spec.origin
    # The library refers to this installation's folder, where the loader looks for torch's own.
    home = Path(spec.origin).parent
    of = f"{version('torch')} {home}"
    key = hashlib.sha256(SOURCE.read_bytes() + of.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = cache / "expertflow" / f"fake_card-{key}.so"
    if library.is_file():
        return library
    paths = [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
    command = [compiler, "-std=c++20", "-fPIC", "-shared", str(SOURCE), *paths]
    library.parent.mkdir(parents=True, exist_ok=True)
    with replacing(library) as partial:
        done = subprocess.run(
            [*command, "-lc10", "-ltorch_cpu", "-o", str(partial)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise TrainingError(f"{SOURCE.name} does not compile: {single_line(done.stderr, 300)}")
    return library


def pose_as_card() -> None:
    """Make torch, and triton if installed, see one card that computes nothing.

    Raises TrainingError if torch is already imported: it looks for CUDA's hooks only once.
    """
    if "torch" in sys.modules:
        raise TrainingError("torch is already imported; pose as a card before that")
    ctypes.CDLL(str(build_guard()))
    # peft looks for a card at import, and must not find this one.
    import peft  # noqa: F401

    _patch_torch()
    _patch_triton()


def checking(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the variable-length kernel with a check for arguments that a card would reject."""
    import torch

    half = torch.bfloat16, torch.float16

    def check_and_call(
        query: Any, key: Any, value: Any, from_q: Any, from_k: Any, *longest: int, **options: Any
    ) -> Any:
        for tensor in (query, key, value):
            assert tensor.device.type == "cuda" and tensor.dtype in half, tensor
            assert tensor.dim() == 3 and tensor.stride(-1) == 1, tensor
            assert tensor.dtype == query.dtype and tensor.shape[2] == query.shape[2], tensor
        assert query.shape[2] % 8 == 0 and query.shape[2] <= 256, query
        assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0, key
        assert options["enable_gqa"] == (query.shape[1] != key.shape[1])
        for bounds in (from_q, from_k):
            assert bounds.device.type == "cuda" and bounds.dtype == torch.int32, bounds
        assert all(type(n) is int and n > 0 for n in longest), longest
        return kernel(query, key, value, from_q, from_k, *longest, **options)

    return check_and_call


def _patch_torch() -> None:
    import torch
    from torch._dynamo.device_interface import CudaInterface

    def answer(value: Any) -> Any:
        return lambda *_, **__: value

    torch.version.cuda = "13.0"
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "is_available": True, "is_initialized": True, "_is_compiled": True,
        "is_bf16_supported": True, "get_device_capability": CAPABILITY, "device_count": 1,
        "get_device_properties": PROPERTIES, "_get_device_properties": PROPERTIES,
        "current_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "set_device": None, "synchronize": None, "_lazy_init": None, "set_rng_state": None,
        "get_rng_state": random_state,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, answer(value))
    for name in ("getDevice", "exchangeDevice", "maybeExchangeDevice", "getCurrentRawStream"):
        setattr(torch._C, f"_cuda_{name}", answer(0))
    torch._C._cuda_setDevice = answer(None)
    of_compiler = {
        "get_device_properties": PROPERTIES, "current_device": 0, "device_count": 1,
        "is_available": True, "get_compute_capability": 90,
        "synchronize": None, "set_device": None, "exchange_device": 0,
        "maybe_exchange_device": 0, "is_bf16_supported": True,
    }  # fmt: skip
    for name, value in of_compiler.items():
        setattr(CudaInterface, name, staticmethod(answer(value)))
    for name in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, name, staticmethod(answer(of_compiler[name])))


def _patch_triton() -> None:
    import torch

    try:
        import triton  # type: ignore[import-not-found]
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    except ImportError:
        return
    limits = {
        "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
        "multiprocessor_count": PROPERTIES.multi_processor_count,
    }
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=0: 0,
        get_device_capability=lambda _device=0: CAPABILITY,
        get_active_torch_device=lambda: torch.device("cuda"),
        utils=SimpleNamespace(get_device_properties=lambda _device: limits),
    )
    triton.runtime.driver.set_active(driver)
