"""Compile decoder layers for an absent card, and count the bytes that its kernels move."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx, config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

KIB = 1024


class Kernel(NamedTuple):
    """A launch in a compiled graph; ``name`` is a library kernel's, None for a generated one."""

    name: str | None
    n_bytes: int


class LayerCompiler:
    """A backend for ``torch.compile`` that plans a card's kernels and runs the graph itself."""

    def __init__(self) -> None:
        # The launches of each compiled graph, in order, with its direction.
        self.graphs: list[tuple[str, list[Kernel]]] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Any:
        with without_examples():
            return compile_fx.compile_fx(graph, examples, inner_compile=self._plan)

    def _plan(self, graph: torch.fx.GraphModule, examples: Any, **options: Any) -> Any:
        way = "backward" if options.get("is_backward") else "forward"
        eager, to_module = copy.deepcopy(graph), GraphLowering.compile_to_module

        def read_kernels(lowering: Any) -> Any:
            # Constants folded at compile time are graphs of their own.
            if getattr(lowering, "is_const_graph", False):
                return to_module(lowering)
            lowering.codegen()
            self.graphs.append((way, [_kernel(node) for node in lowering.scheduler.nodes]))
            raise _Planned

        reading = mock.patch.object(GraphLowering, "compile_to_module", read_kernels)
        with without_examples(), reading:
            try:
                compile_fx.compile_fx_inner(graph, examples, **options)
            except torch._inductor.exc.InductorError as error:
                if not isinstance(error.inner_exception, _Planned):
                    raise
        return make_boxed_func(eager.forward)


@contextmanager
def without_examples() -> Iterator[None]:
    """Skip the compiler's trials on a card, and its caches."""

    def idle(*_: Any, **__: Any) -> None:
        pass

    with (
        mock.patch.object(joint_graph, "lazy_init", idle),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", idle),
        config.patch(joint_graph_constant_folding=False, fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


class _Planned(Exception):
    """Signals that the kernels are known and no module is needed."""


def _kernel(node: Any) -> Kernel:
    name = None
    if "Extern" in type(node).__name__:
        name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
    elif "Nop" in type(node).__name__:
        name = "nothing"
    return Kernel(name, node.get_read_write_buffers_sizes())


def summarize_graphs(graphs: list[tuple[str, list[Kernel]]], n_tokens: int) -> dict[str, Any]:
    """Count one layer: its longest forward and backward graph, like an upper layer's."""
    layer: list[Kernel] = []
    for way in ("forward", "backward"):
        of_way = [kernels for one, kernels in graphs if one == way]
        layer += max(of_way, key=lambda ks: sum(k.n_bytes for k in ks), default=[])
    own = [kernel for kernel in layer if kernel.name is None]
    return {
        "kernels_per_layer": len(own),
        "kb_per_token_and_layer": round(sum(k.n_bytes for k in own) / n_tokens / KIB, 1),
        "products_per_layer": sum(1 for k in layer if k.name and "mm" in k.name),
        "launches_per_layer": sum(1 for k in layer if k.name != "nothing"),
    }


class EagerWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that launch a kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_launches = 0
        self.n_bytes = 0

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count a function on fake tensors by the kernels of its compiled graph."""
        compiler = LayerCompiler()
        by_card = torch.compile(function, backend=compiler, dynamic=False)

        def call(*inputs: Any) -> Any:
            # Nothing compiles while a mode like this one is active.
            with _disable_current_modes(), inputs[0].fake_mode:
                out = by_card(*inputs)
            for kernel in compiler.graphs[-1][1]:
                self.n_launches += kernel.name != "nothing"
                self.n_bytes += kernel.n_bytes
            return out

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_work = func.namespace == "aten" and not func.is_view
        if is_work and "empty" not in str(func) and "detach" not in str(func):
            tensors = [t for t in tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
            self.n_launches += 1
            self.n_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result
