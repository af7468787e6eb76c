"""Run a training step without data or device and find its peak live bytes.

A model is traced with two and with three layers and extrapolated: in each phase, one more layer
adds the same bytes at every moment that can be the peak. Fake tensors have shapes and storages but
no data, and pose as the CPU's. A GPU's behavior is emulated: the variable-length kernel, dropout,
LayerNorm, the rows of a loss chunk, 4-bit products.
"""

import copy
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertflow.core.errors import TrainingError, single_line
from expertflow.core.records import Record, fill_record
from expertflow.hardware.gpu_table import is_ampere
from expertflow.hardware.records import GpuFacts
from expertflow.plan.flops import is_head_trained
from expertflow.plan.memory import loss_chunk_rows
from expertflow.plan.records import MemoryLine, MemoryTrace, PlanSpec
from expertflow.plan.settings import LoraSpec
from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import Batch
from expertflow.train.model import attention, loss
from expertflow.train.model.attention import caps_scores
from expertflow.train.model.load import DTYPES, add_adapter
from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers

# Layers that are traced; a smaller model is traced as it is.
FEWEST_LAYERS = 2
# Rows traced if the micro-batch is free. A given one replaces the middle value, and twice it the
# last if larger. The most rows that fit into one loss chunk, and one more, are traced too.
ROWS = (1, 4, 16)
# Codes of half a byte; a scale byte per 64 weights, and four more bytes per 256 such scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


class TracedRun(Record, frozen=True, kw_only=True):
    """What decides a step's bytes; ``kernel``: the card has the variable-length kernel."""

    config: Any
    method: str
    lora: LoraSpec | None
    attention: str
    dtype: torch.dtype
    kernel: bool
    supervised_fraction: float
    card_bytes: int | None = None
    trained_dtype: torch.dtype = torch.float32


def read_config(directory: Path) -> transformers.PretrainedConfig:
    try:
        config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        why = f"transformers cannot build it ({single_line(error, 160)}); check its config.json"
        raise TrainingError(f"{directory}: {why}") from error
    return config


def build_model(run: TracedRun, *, n_layers: int, checkpoint: bool) -> Any:
    """Build the model as training would, without weights."""
    short, family = copy.deepcopy(run.config), run.config.model_type
    if kinds := getattr(short, "layer_types", None):
        short.layer_types = kinds[:n_layers]
    short.num_hidden_layers = n_layers
    with torch.device("meta"):
        try:
            net: Any = transformers.AutoModelForCausalLM.from_config(
                short,
                dtype=run.trained_dtype if run.method == "full" else run.dtype,
                attn_implementation=attention.transformers_name(run.attention),
                trust_remote_code=False,
            )
            if checkpoint:
                net.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise TrainingError(f"{family}: {single_line(error, 160)}") from error
        if len(layers := decoder_layers(net)) != n_layers:
            raise TrainingError(f"{family}: its decoder layers are unknown")
        if run.method == "qlora":
            for module in (module for layer in layers for module in layer.modules()):
                if isinstance(module, torch.nn.Linear):
                    n_bytes = math.ceil(module.weight.numel() * NF4_BYTES)
                    codes = torch.empty(n_bytes, dtype=torch.uint8)
                    module.weight = torch.nn.Parameter(codes, requires_grad=False)
                    module.__class__ = _FourBitLinear
        if run.lora is not None:
            net = add_adapter(net, run.lora)
    for module in net.modules():
        if type(module) in AS_ON_CARD:
            module.__class__ = AS_ON_CARD[type(module)]
        if run.method == "qlora":
            # Adapters on 4-bit layers leave their inputs' type to autocast; the name is peft's.
            module.cast_input_dtype_enabled = False
    return net.train()


def materialize_weights(net: Any, *, device: str = "cpu") -> None:
    """Allocate the weights, a tied one once (``to_empty`` would allocate it twice)."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in made:
                    new = torch.empty_strided(
                        old.shape, old.stride(), dtype=old.dtype, device=device
                    ).zero_()
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = old, new
                if old is not None:
                    tensors[name] = made[id(old)][1]


@contextmanager
def as_on_card(run: TracedRun) -> Iterator[None]:
    """Make fake tensors, and let attention and loss choose as on the card."""
    route: dict[str, Any] = {"varlen_unavailable_reason": lambda *_: None}
    if not run.kernel:
        route |= {"KERNEL": _one_by_one, "TAKES_GROUPED_HEADS": False}
    with (
        mock.patch.multiple(attention, **route),
        mock.patch.object(loss, "CHUNK", chunk_of(run)),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def _one_by_one(*arguments: Any, **options: Any) -> torch.Tensor:
    """Stand in for one memory-efficient SDPA call per document, with the results joined."""
    return torch.clone(varlen.varlen_attn(*arguments, **options))  # type: ignore[arg-type]


def chunk_of(run: TracedRun) -> int:
    config = run.config.get_text_config()
    trained = is_head_trained(run.lora, tied=config.tie_word_embeddings)
    return loss_chunk_rows(config.vocab_size, run.card_bytes, trained=trained)


class _FusedDropout(torch.nn.Dropout):
    """Dropout as on CUDA: it keeps one byte per element for the backward pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_on = self.training and self.p > 0
        return torch.native_dropout(input, self.p, True)[0] if is_on else input


class _WideLayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = (None if t is None else t.float() for t in (self.weight, self.bias))
        return functional.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)


AS_ON_CARD: dict[type, type] = {
    torch.nn.Dropout: _FusedDropout,
    torch.nn.LayerNorm: _WideLayerNorm,
}


class _FourBitProduct(torch.autograd.Function):
    """A product with dequantized weights, recomputed for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return functional.linear(x, torch.empty_like(weight, device=x.device))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = torch.empty(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        return gradient @ weight, None


class _FourBitLinear(torch.nn.Linear):
    """A linear layer with 4-bit weights; ``weight`` has a shape and no storage."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        stand_in = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")
        out: torch.Tensor = _FourBitProduct.apply(input.to(dtype), stand_in)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(dtype)


def n_targets_of_row(length: int, supervised_fraction: float) -> int:
    """Return the targets of a row: at least one, and none for its first token."""
    return max(1, min(length - 1, math.ceil(supervised_fraction * length)))


def sample_batch(documents: Sequence[int], n_rows: int, supervised_fraction: float) -> Batch:
    """Make rows of documents with these lengths; the first tokens of each row are supervised."""
    length = sum(documents)
    labels = torch.full((n_rows, length), IGNORE, dtype=torch.int32)
    n_targets = n_targets_of_row(length, supervised_fraction)
    labels[:, 1 : 1 + n_targets] = 0
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in documents])
    bounds = [0, *accumulate([*documents] * n_rows)]
    return Batch(
        input_ids_BL=torch.zeros((n_rows, length), dtype=torch.int32),
        position_ids_BL=positions.repeat(n_rows, 1),
        labels_BL=labels,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_length=length,
        n_tokens=n_rows * length,
        n_target_tokens=n_rows * n_targets,
        rows=tuple(range(n_rows)),
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each storage once, from creation to its end, views included.

    Memory that a kernel uses internally is not counted. ``peaks``: most live bytes, by phase.
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
    lines, length = [], sequence_length_tokens
    try:
        if not (spec.bf16 or spec.fp16):
            raise TrainingError("an fp32 step on a card is not traced")
        if spec.method == "qlora" and spec.lora is not None and spec.lora.use_dora:
            raise TrainingError("a DoRA step on 4-bit weights is not traced")
        kind = "flex" if attention == "flex" else "capped" if caps_scores(read_config(base)) else ""
        if kind:
            raise TrainingError(f"{kind} attention is not traced")
        run = fill_record(
            TracedRun,
            spec,
            config=read_config(base),
            attention=attention,
            dtype=torch.bfloat16,
            kernel=is_ampere(gpu),
            supervised_fraction=supervised_fraction,
            card_bytes=gpu.memory_total_bytes,
            trained_dtype=DTYPES[spec.trained_dtype],
        )
        wanted = spec.batch_size
        some = ROWS if wanted is None else (1, wanted, max(ROWS[-1], 2 * wanted))
        full = chunk_of(run) // n_targets_of_row(length, supervised_fraction)
        rows = sorted({*some, *(n for n in (full, full + 1) if 1 < n < max(some))})
        for on in (False, True):
            peaks = [whole_model(run, n, length, checkpoint=on) for n in rows]
            model_bytes, gradient_bytes, step_bytes = zip(*peaks, strict=True)
            line = MemoryLine(
                checkpoint_activations=on,
                model_bytes=model_bytes[0],
                gradient_bytes=gradient_bytes[0],
                n_tokens=tuple(n * length for n in rows),
                step_bytes=step_bytes,
            )
            lines.append(line)
    except TrainingError as error:
        return MemoryTrace(lines=(), unavailable_reason=str(error))
    return MemoryTrace(lines=tuple(lines))


def import_code(base: Path, *, adapter: bool) -> None:
    # The mapping imports a class on access.
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(read_config(base)), None)
    if adapter:
        import peft  # noqa: F401


def whole_model(
    run: TracedRun, n_rows: int, length: int, *, checkpoint: bool
) -> tuple[int, int, int]:
    """Return bytes of the model, the gradients and the rest of a step, with all layers."""
    n_layers = run.config.num_hidden_layers
    if n_layers <= FEWEST_LAYERS + 1:
        model, gradients, phases = trace_step(run, n_layers, n_rows, length, checkpoint=checkpoint)
        return model, gradients, max(phases.values())
    fewer, more = (
        trace_step(run, FEWEST_LAYERS + i, n_rows, length, checkpoint=checkpoint) for i in (0, 1)
    )
    n_further = n_layers - FEWEST_LAYERS
    model, gradients = (fewer[i] + n_further * (more[i] - fewer[i]) for i in (0, 1))  # type: ignore[operator]
    phases = {
        phase: fewer[2][phase] + n_further * (more[2][phase] - fewer[2][phase])
        for phase in ("forward", "top")
    }
    return model, gradients, max(*phases.values(), fewer[2]["bottom"])


def trace_step(
    run: TracedRun, n_layers: int, n_rows: int, length: int, *, checkpoint: bool
) -> tuple[int, int, dict[str, int]]:
    net = build_model(run, n_layers=n_layers, checkpoint=checkpoint)
    with as_on_card(run):
        materialize_weights(net)
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
        with torch.autocast("cpu", dtype=run.dtype, enabled=run.dtype != torch.float32):
            value = loss(sample_batch((length,), n_rows, run.supervised_fraction))
        live.enter("top")
        value.backward()
    phases = {name: peak - start for name, peak in live.peaks.items() if name}
    return model_bytes, start - model_bytes, phases


def _mark_backward(net: Any, live: LiveBytes) -> None:
    def mark(phase: str, _module: Any, args: Any) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda _gradient: live.enter(phase))

    layers = decoder_layers(causal_lm(net))
    layers[-1].register_forward_pre_hook(partial(mark, "middle"))
    if len(layers) > 1:
        layers[1].register_forward_pre_hook(partial(mark, "bottom"))
