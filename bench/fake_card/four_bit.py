"""Build a model of 4-bit layers, with bitsandbytes' own classes and without values."""

from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit

# Weights that share a scale, and scales that share a second-level scale.
BLOCK, OUTER_BLOCK = 64, 256


def pack_layers(net: Any, layers: list[torch.nn.Module]) -> None:
    """Turn the linear modules of a model's layers into 4-bit ones; call before adding adapters.

    Their parameters are plain ones, because bitsandbytes' own class cannot be a fake tensor.
    """
    for linear in (m for layer in layers for m in layer.modules() if type(m) is torch.nn.Linear):
        codes = torch.empty(linear.weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
        linear.__class__ = Linear4bit
        linear.weight = torch.nn.Parameter(codes, requires_grad=False)
        linear.compute_dtype, linear.compute_type_is_set = torch.bfloat16, True
        linear.support_avx512bf16_for_cpu = False
        _describe(linear, None)
    net.is_loaded_in_4bit = True


def fill_layers(net: Any) -> None:
    """Add the scales on the card; call once the weights are on it."""
    for linear in (module for module in net.modules() if isinstance(module, Linear4bit)):
        n_scales = linear.weight.numel() * 2 // BLOCK
        outer = QuantState(
            absmax=torch.empty(-(-n_scales // OUTER_BLOCK), device="cuda"),
            code=torch.empty(256, device="cuda"),
            blocksize=OUTER_BLOCK,
            dtype=torch.float32,
        )
        state = QuantState(
            absmax=torch.empty(n_scales, dtype=torch.uint8, device="cuda"),
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=torch.empty(16, device="cuda"),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.bfloat16,
            offset=torch.empty((), device="cuda"),
            state2=outer,
        )
        _describe(linear, state)


def _describe(linear: Any, state: QuantState | None) -> None:
    linear.quant_state = linear.weight.quant_state = state
    linear.weight.quant_type, linear.weight.compress_statistics = "nf4", True
    linear.quant_storage = linear.weight.quant_storage = torch.uint8
    linear.weight.bnb_quantized = True
