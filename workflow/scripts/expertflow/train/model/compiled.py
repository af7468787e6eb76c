"""Compile a model layer by layer, so that identical layers compile once."""

import os
import shutil
from subprocess import SubprocessError
from typing import Any

import torch
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch._dynamo.utils import counters

from expertflow.core.errors import TrainingError, single_line
from expertflow.plan.settings import CompileMode
from expertflow.train.model import attention
from expertflow.train.model.packed import causal_lm, decoder_layers

# Kinds of layer x training or evaluation x full or last micro-batch.
# Beyond this many graphs torch runs a layer uncompiled and only warns.
MAX_GRAPHS = 32
# Since 2.13, torch calls this before a kernel draws four random numbers at once.
FOUR_AT_ONCE = "_can_use_4x_random"
# Distinguishes kernels compiled without that in the on-disk cache.
ONE_BY_ONE = "random numbers one by one"
# What compiling may raise, depending on where it fails: in the compiler, in triton, in the linker.
FAILURES = (RuntimeError, OSError, ImportError, AssertionError, SubprocessError)


def compile_layers(
    model: Any,
    *,
    dtype: torch.dtype,
    backend: str = "inductor",
    mode: CompileMode = "default",
) -> str | None:
    """Compile each decoder layer when it first runs; return the reason if that is impossible.

    Attention that loops over documents breaks its layer's graph, which checkpointing forbids.
    """
    # A retry in this process has other shapes, and would count toward the same limit of graphs.
    torch._dynamo.reset()
    counters.clear()
    lm = causal_lm(model)
    layers = decoder_layers(lm)
    if not layers:
        raise TrainingError(
            f"training.torch_compile: {lm.config.model_type} has no known decoder layers; set it to"
            " false"
        )
    device = next(lm.parameters()).device
    own = lm.config._attn_implementation == attention.NAME
    caps = attention.caps_scores(lm.config)
    loops = own and attention.varlen_unavailable_reason(device, dtype, caps) is not None
    if loops and any(layer.gradient_checkpointing for layer in layers):
        return "layers not compiled: checkpointed ones cannot loop over documents in a graph"
    if backend == "inductor":
        _check_tools(device)
        _draw_one_by_one()
    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    # Layers are separate graphs already; DDP's optimizer would split them again at its buckets.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        # In place, unlike torch.compile(layer): names of parameters stay as they are saved.
        layer.compile(dynamic=False, backend=backend, mode=mode)
    return None


def describe_compilation() -> str:
    stats, breaks = counters["stats"], counters["graph_break"]
    n_again = sum(n - 1 for n in FRAME_COMPILE_COUNTER.values() if n > 1)
    found = f"{stats['unique_graphs']} graphs of {stats['calls_captured']} operations compiled"
    found += f", {sum(breaks.values())} graph breaks, {n_again} recompilations"
    return found + "".join(f"; break: {reason.splitlines()[0]}" for reason in sorted(breaks)[:3])


def _check_tools(device: torch.device) -> None:
    if device.type == "cuda":
        _try_a_kernel(device)
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise TrainingError(
            f"training.torch_compile needs a C++ compiler, {compiler}; install it, or set it to"
            " false"
        )


def _try_a_kernel(device: torch.device) -> None:
    """Build and run a minimal kernel; it needs triton, a C compiler and Python's headers."""
    try:
        torch.compile(lambda x: -x)(torch.zeros(1, device=device))
    except FAILURES as error:
        raise TrainingError(
            "training.torch_compile: no kernel can be built here"
            f" ({single_line(error, 300)}); install triton, gcc and this"
            " Python's headers (python3-dev), or set it to false"
        ) from error


def _draw_one_by_one() -> None:
    """Make each random number of a kernel depend only on the seed and its position.

    Drawn four at once, they also depend on the kernel's shape (pytorch issue 198333): a
    checkpointed layer, recomputed by other kernels, would silently get another dropout mask.
    """
    from torch._inductor.codegen.triton import TritonOverrides

    if not hasattr(TritonOverrides, FOUR_AT_ONCE):
        return
    setattr(TritonOverrides, FOUR_AT_ONCE, staticmethod(lambda: False))
    if ONE_BY_ONE not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += ONE_BY_ONE
