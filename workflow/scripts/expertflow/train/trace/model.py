"""Build a run's model without weights, as it will be on a GPU, and a batch for it.

Fake tensors have shapes and storages but no data, and pose as the CPU's. GPU behavior is emulated:
the variable-length kernel, dropout, LayerNorm, the rows of a loss chunk, 4-bit products.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import varlen
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from expertflow.core.errors import TrainingError
from expertflow.core.records import Record
from expertflow.plan.settings import LoraSpec
from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import Batch
from expertflow.train.model import attention, loss
from expertflow.train.model.load import add_adapter
from expertflow.train.model.packed import decoder_layers

# Codes of half a byte; a scale byte per 64 weights, and four more bytes per 256 such scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


class TracedRun(Record, frozen=True, kw_only=True):
    """The parts of a run that decide a step's bytes.

    ``kernel``: the GPU has the variable-length kernel; else documents go one by one.
    """

    config: Any
    method: str
    lora: LoraSpec | None
    attention: str
    dtype: torch.dtype
    kernel: bool
    supervised_fraction: float


def read_config(directory: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(
            f"{directory}: transformers cannot build it ({' '.join(str(error).split())[:160]});"
            " check its config.json"
        ) from error
    return config


def build(run: TracedRun, *, n_layers: int, checkpoint: bool) -> Any:
    attention.register()
    with torch.device("meta"):
        try:
            net: Any = AutoModelForCausalLM.from_config(
                _shortened(run.config, n_layers),
                dtype=torch.float32 if run.method == "full" else run.dtype,
                attn_implementation=attention.implementation(run.attention),
                trust_remote_code=False,
            )
            if checkpoint:
                net.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise TrainingError(
                f"{run.config.model_type}: {' '.join(str(error).split())[:160]}"
            ) from error
        if len(decoder_layers(net)) != n_layers:
            raise TrainingError(f"{run.config.model_type}: its decoder layers are not known")
        if run.method == "qlora":
            _in_four_bits(net)
        if run.lora is not None:
            net = add_adapter(net, run.lora)
    for module in net.modules():
        if type(module) in AS_ON_CARD:
            module.__class__ = AS_ON_CARD[type(module)]
        if run.method == "qlora":
            # Adapters on 4-bit layers leave their inputs' type to autocast; the name is peft's.
            module.cast_input_dtype_enabled = False
    return net.train()


def materialize(net: Any, *, fake: bool) -> None:
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_cpu(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in made:
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
            if not fake:
                new.zero_()
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(old)] = old, new
        return made[id(old)][1]

    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = on_cpu(tensor)


@contextmanager
def as_on_card(run: TracedRun) -> Iterator[FakeTensorMode]:
    kernel = attention.KERNEL if run.kernel else _one_by_one()
    changed = (
        (attention, "varlen_hindrance", lambda _device, _dtype: None),
        (attention, "KERNEL", kernel),
        (loss, "CHUNK", chunk_of(run)),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def chunk_of(run: TracedRun) -> int:
    return loss.CHUNK_OF_TRAINED_HEAD if run.method == "full" else loss.CHUNK


def _shortened(config: Any, n_layers: int) -> Any:
    short = copy.deepcopy(config)
    kinds = getattr(short, "layer_types", None)
    if kinds:
        short.layer_types = kinds[:n_layers]
    short.num_hidden_layers = n_layers
    return short


def _one_by_one() -> attention.Kernel:
    """Stand for one memory-efficient SDPA call per document, with heads ungrouped."""

    def call(*args: Any, window_size: Any = None, scale: Any = None) -> torch.Tensor:
        out: Any = varlen.varlen_attn(*args, window_size=window_size, scale=scale)
        whole: torch.Tensor = out.clone()
        return whole

    return attention.Kernel(call=call, keywords=frozenset({"window_size", "scale"}))


class _FusedDropout(torch.nn.Dropout):
    """Dropout as on CUDA: it keeps one byte per element for the backward pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        return torch.native_dropout(input, self.p, True)[0]


class _WideLayerNorm(torch.nn.LayerNorm):
    """LayerNorm in fp32, as under CUDA's autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = (None if t is None else t.float() for t in (self.weight, self.bias))
        shape = self.normalized_shape
        return functional.layer_norm(input.float(), shape, weight, bias, self.eps)


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
        shape = self.out_features, self.in_features
        stand_in = torch.empty(shape, dtype=dtype, device="meta")
        out: torch.Tensor = _FourBitProduct.apply(input.to(dtype), stand_in)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(dtype)


def _in_four_bits(net: Any) -> None:
    for layer in decoder_layers(net):
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                n_bytes = math.ceil(module.weight.numel() * NF4_BYTES)
                codes = torch.empty(n_bytes, dtype=torch.uint8)
                module.weight = torch.nn.Parameter(codes, requires_grad=False)
                module.__class__ = _FourBitLinear


def n_targets_of_row(length: int, supervised_fraction: float) -> int:
    """Return the targets of a row: at least one, and none for its first token."""
    return max(1, min(length - 1, math.ceil(supervised_fraction * length)))


def sample_batch(documents: Sequence[int], n_rows: int, supervised_fraction: float) -> Batch:
    """Make rows of documents of these lengths; the first tokens of each row are supervised."""
    length, n_documents = sum(documents), len(documents) * n_rows
    labels = torch.full((n_rows, length), IGNORE, dtype=torch.int32)
    n_targets = n_targets_of_row(length, supervised_fraction)
    labels[:, 1 : 1 + n_targets] = 0
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in documents])
    bounds = [0]
    for n in [*documents] * n_rows:
        bounds.append(bounds[-1] + n)
    return Batch(
        input_ids_BL=torch.zeros((n_rows, length), dtype=torch.int32),
        position_ids_BL=positions.repeat(n_rows, 1),
        labels_BL=labels,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_documents=n_documents,
        max_length=length,
        n_tokens=n_rows * length,
        n_target_tokens=n_rows * n_targets,
        rows=tuple(range(n_rows)),
    )
