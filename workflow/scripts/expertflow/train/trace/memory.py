"""Run a training step without data or device and find its peak of live bytes.

A model is traced with two and with three layers and extrapolated: in each phase, one more layer
adds the same bytes at every moment that can be the peak.
"""

import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from expertflow.core.errors import TrainingError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import MemoryLine, MemoryTrace, PlanSpec
from expertflow.train.model.attention import KERNEL_CAPABILITY
from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers
from expertflow.train.trace.model import (
    TracedRun,
    as_on_card,
    build,
    chunk_of,
    materialize,
    n_targets_of_row,
    read_config,
    sample_batch,
)

# Layers that are traced; a model with no more is traced as it is.
FEWEST_LAYERS = 2
# Rows traced if the micro-batch is free. A given one replaces the middle value, and at least twice
# it the last. Both sides of the point where the loss starts to need more than one chunk are traced
# too: beyond it the logits take no more bytes.
ROWS = (1, 4, 16)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each storage once, from creation to its end, views included.

    Memory that a kernel needs internally is not seen. ``peaks``: most bytes alive, by phase.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peaks: dict[str, int] = defaultdict(int)
        self._phase = ""
        self._alive: dict[int, weakref.ref[Any]] = {}

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._note()

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now_bytes -= n_bytes

        self._alive[key] = weakref.ref(storage, freed)
        self.now_bytes += n_bytes
        self._note()

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks[self._phase], self.now_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result


def trace_memory(
    base: Path,
    spec: PlanSpec,
    *,
    gpu: GpuFacts,
    attention: str,
    sequence_length_tokens: int,
    supervised_fraction: float,
) -> MemoryTrace:
    """Trace a step with and without checkpointing at some micro-batches, or explain why not."""
    given = spec.batch_size
    few = ROWS if given is None else (1, given, max(ROWS[-1], 2 * given))
    lines = []
    try:
        run = traced_run(base, spec, gpu, attention, supervised_fraction)
        rows = with_full_chunk(few, run, sequence_length_tokens)
        for on in (False, True):
            peaks = [whole_model(run, n, sequence_length_tokens, checkpoint=on) for n in rows]
            n_tokens = tuple(n * sequence_length_tokens for n in rows)
            model_bytes, gradient_bytes, step_bytes = zip(*peaks, strict=True)
            line = MemoryLine(
                checkpoint_activations=on,
                model_bytes=model_bytes[0],
                gradient_bytes=gradient_bytes[0],
                n_tokens=n_tokens,
                step_bytes=step_bytes,
            )
            lines.append(line)
    except TrainingError as error:
        return MemoryTrace(precision="", lines=(), hindrance=str(error))
    return MemoryTrace(precision="bf16", lines=tuple(lines))


def import_code(base: Path, *, adapter: bool) -> None:
    # The mapping imports a class on access.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(read_config(base)), None)
    if adapter:
        import peft  # noqa: F401


def with_full_chunk(rows: tuple[int, ...], run: TracedRun, length: int) -> tuple[int, ...]:
    full = chunk_of(run) // n_targets_of_row(length, run.supervised_fraction)
    further = {n for n in (full, full + 1) if 1 < n < max(rows)}
    return tuple(sorted({*rows, *further}))


def traced_run(
    base: Path, spec: PlanSpec, gpu: GpuFacts, attention: str, supervised_fraction: float
) -> TracedRun:
    if not (spec.bf16 or spec.fp16):
        raise TrainingError("a step in fp32 on a card is not traced")
    if spec.method == "qlora" and spec.lora is not None and spec.lora.use_dora:
        raise TrainingError("a step of DoRA on 4-bit weights is not traced")
    if attention == "flex":
        raise TrainingError("flex attention is not traced")
    return TracedRun(
        config=read_config(base),
        method=spec.method,
        lora=spec.lora,
        attention=attention,
        # fp16 takes as many bytes.
        dtype=torch.bfloat16,
        kernel=_has_kernel(gpu),
        supervised_fraction=supervised_fraction,
    )


def whole_model(
    run: TracedRun, n_rows: int, length: int, *, checkpoint: bool
) -> tuple[int, int, int]:
    """Return bytes of the model, the gradients and the rest of a step, with all layers."""
    n_layers = run.config.num_hidden_layers
    if n_layers <= FEWEST_LAYERS + 1:
        model, gradients, phases = trace(run, n_layers, n_rows, length, checkpoint=checkpoint)
        return model, gradients, max(phases.values())
    fewer, more = (
        trace(run, FEWEST_LAYERS + i, n_rows, length, checkpoint=checkpoint) for i in (0, 1)
    )
    n_further = n_layers - FEWEST_LAYERS
    model, gradients = (fewer[i] + n_further * (more[i] - fewer[i]) for i in (0, 1))  # type: ignore[operator]
    phases = {
        phase: fewer[2][phase] + n_further * (more[2][phase] - fewer[2][phase])
        for phase in ("forward", "top")
    }
    return model, gradients, max(*phases.values(), fewer[2]["bottom"])


def trace(
    run: TracedRun, n_layers: int, n_rows: int, length: int, *, checkpoint: bool
) -> tuple[int, int, dict[str, int]]:
    """Trace a step; return bytes of model and gradients, and of each phase beyond them."""
    net = build(run, n_layers=n_layers, checkpoint=checkpoint)
    with as_on_card(run):
        materialize(net, fake=True)
        return follow_step(net, run, n_rows, length)


def follow_step(
    net: Any, run: TracedRun, n_rows: int, length: int
) -> tuple[int, int, dict[str, int]]:
    """Run a micro-batch forward and backward and track its bytes by phase.

    Phases are ``forward``, with the loss; the backward pass of the loss and the ``top`` layer; the
    ``middle``; and that of the ``bottom`` layer and the embeddings.
    """
    live = LiveBytes()
    for tensor in (*net.parameters(), *net.buffers()):
        live.count(tensor)
    model_bytes = live.now_bytes
    with live:
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        start = live.now_bytes
        _mark_backward(net, live)
        live.enter("forward")
        loss = PackedLoss(net)
        half = run.dtype != torch.float32
        with torch.autocast("cpu", dtype=run.dtype, enabled=half):
            value = loss(sample_batch((length,), n_rows, run.supervised_fraction))
        live.enter("top")
        value.backward()
    phases = {name: peak - start for name, peak in live.peaks.items() if name}
    return model_bytes, start - model_bytes, phases


def _mark_backward(net: Any, live: LiveBytes) -> None:
    layers = decoder_layers(causal_lm(net))

    def at(phase: str) -> Any:
        def mark(_module: Any, args: Any) -> None:
            if args[0].requires_grad:
                args[0].register_hook(lambda _gradient: live.enter(phase))

        return mark

    layers[-1].register_forward_pre_hook(at("middle"))
    if len(layers) > 1:
        layers[1].register_forward_pre_hook(at("bottom"))


def _has_kernel(gpu: GpuFacts) -> bool:
    if gpu.compute_capability is None:
        return gpu.peak_bf16_flops_per_s is not None
    major, _, minor = gpu.compute_capability.partition(".")
    return (int(major), int(minor or 0)) >= KERNEL_CAPABILITY
