"""The frozen base in 4 bits (NF4, double quantised), for QLoRA: loaded, held steady, turned back.

Embeddings and head stay in the plan's precision: the loss reads the head itself. bitsandbytes is an
extra, imported only where method qlora asks for it.
"""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from expertflow.core.errors import TrainingError

EXTRA = "envs/requirements-bitsandbytes.lock"


def require_bitsandbytes() -> None:
    """Check that 4-bit layers can be had.

    Raises:
        TrainingError: the package is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise TrainingError(
            "training.method qlora needs bitsandbytes, which is not installed; run pip install -r"
            f" {EXTRA}, or use method lora"
        )


def loading_options(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Say how transformers shall quantise each weight on ``device`` as it reads it.

    The 4-bit codes depend on ``dtype``, in which the weights are read: whoever loads the base again
    must read it alike.
    """
    require_bitsandbytes()
    cuda = device.type == "cuda"
    index = torch.cuda.current_device() if cuda and device.index is None else device.index
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
        "device_map": {"": index if cuda else "cpu"},
    }


def is_quantised(model: Any) -> bool:
    """Tell whether a model's layers are in 4 bits."""
    return bool(getattr(model, "is_loaded_in_4bit", False))


def quantised_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Give the 4-bit layers by name."""
    from bitsandbytes.nn.modules import Linear4bit

    return {name: m for name, m in model.named_modules() if isinstance(m, Linear4bit)}


def hold_steady(model: torch.nn.Module) -> None:
    """Keep the weights as they were quantised.

    On CPUs with AVX512-BF16, bitsandbytes packs the weights anew at the first forward pass without
    gradients, rounds their scales to bf16, and from then on passes no gradient through the layer.
    So an evaluation would spoil the training after it. Instead torch multiplies by the dequantised
    weights, as on every other CPU, and what bitsandbytes says there of the package ``kernels`` is
    of no account.
    """
    for layer in quantised_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


def compute_in_fp32(model: torch.nn.Module) -> None:
    """Compute in fp32 on the same 4-bit codes, so that a comparison is not lost in rounding."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for layer in quantised_layers(model).values():
        layer.compute_dtype = torch.float32
        layer.weight.quant_state.dtype = torch.float32


def dequantise(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the 4-bit layers by plain ones that hold what the 4 bits stand for."""
    from bitsandbytes.functional import dequantize_4bit

    for name, layer in quantised_layers(model).items():
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_4bit = False
    return model
