"""Load models for training, scoring and export, including QLoRA on a 4-bit base.

In 4 bits (NF4, double quantized) the base is frozen; embeddings and head stay in the plan's
precision, as the loss reads the head itself. This needs bitsandbytes, an optional extra.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch.nn import Linear
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from expertflow.core.errors import TrainingError, single_line
from expertflow.plan.records import TrainPlan
from expertflow.plan.settings import ALL_LINEAR, LoraSpec
from expertflow.train.model import attention
from expertflow.train.model.init_adapter import load_init_adapter
from expertflow.train.optimizers import BITSANDBYTES
from expertflow.train.records import Fallback, ModelRecord

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAPTER_FILE = "adapter_config.json"
CPU = torch.device("cpu")


def plain_attention(path: Path) -> str:
    """Return the attention of transformers that best suits the model in a directory."""
    config = json.loads((path / "config.json").read_text("utf-8"))
    return "eager" if config.get("attn_logit_softcapping") else "sdpa"


def load_base(
    path: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    attention_name: str,
    quantized: bool = False,
    device: torch.device = CPU,
) -> PreTrainedModel:
    """Load a model from a directory: safetensors only, no remote code.

    A ``quantized`` model is in 4 bits, computes in ``dtype`` and is on ``device``; any other is on
    the CPU, in the dtype of its file if that is ``auto``. Raises TrainingError if that fails or the
    model is quantized already.
    """
    options = _four_bit_options(dtype, device) if quantized else {}
    try:
        config = Path(path) / "config.json"
        if config.is_file() and "quantization_config" in json.loads(config.read_text("utf-8")):
            raise TrainingError(
                f"model {path}: its weights are already quantized; use the original ones, and"
                " method qlora to train on 4 bits"
            )
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention.transformers_name(attention_name),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **options,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainingError(
            f"model {path}: cannot be loaded ({single_line(error, 200)}); check the directory"
        ) from error
    except RuntimeError as error:
        # transformers only logs what failed while it quantized the weights.
        if torch.cuda.memory_stats().get("num_ooms"):
            raise torch.OutOfMemoryError(f"out of memory while loading {path}") from error
        raise
    if quantized:
        # On CPUs with AVX512-BF16, bitsandbytes repacks the weights at the first forward pass
        # without gradients, rounds their scales to bf16, and then passes no gradient through the
        # layer: an evaluation would break the training after it. Instead torch multiplies by the
        # dequantized weights, as on every other CPU; ignore bitsandbytes's message there about the
        # package ``kernels``.
        for layer in list_quantized_layers(model).values():
            layer.support_avx512bf16_for_cpu = False
    return model


def _four_bit_options(dtype: torch.dtype | Literal["auto"], device: torch.device) -> dict[str, Any]:
    if find_spec("bitsandbytes") is None:
        raise TrainingError(
            "training.method qlora needs bitsandbytes, which is not installed; run pip install -r"
            f" {BITSANDBYTES}, or use method lora"
        )
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


def list_quantized_layers(model: torch.nn.Module) -> dict[str, Any]:
    from bitsandbytes.nn.modules import Linear4bit

    return {name: m for name, m in model.named_modules() if isinstance(m, Linear4bit)}


def add_adapter(model: PreTrainedModel, lora: LoraSpec) -> Any:
    """Wrap a model with a trainable LoRA or DoRA adapter in fp32; freeze the rest of the base."""
    from peft import LoraConfig, get_peft_model

    from expertflow.train.model.adapters import use_own_forward

    layers = [name for name, m in model.named_modules() if isinstance(m, Linear | Conv1D)]
    for target in set(lora.targets) - {ALL_LINEAR}:
        # peft would adapt the targets it finds, and ignore this one.
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise TrainingError(f"training.lora.targets: no layer {target}; the model has {known}")
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        **_whole_modules(model, lora),
        task_type="CAUSAL_LM",
    )
    try:
        net = get_peft_model(model, config)
    except ValueError as error:
        raise TrainingError(
            f"training.lora.targets {', '.join(lora.targets)}: {single_line(error, 160)}"
        ) from error
    # In order: peft's set would be written in another one by each process.
    config.target_modules = sorted(config.target_modules)
    use_own_forward(net)
    # In bf16, an update below 1/512 of its weight would always round to zero.
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return net


def _whole_modules(model: PreTrainedModel, lora: LoraSpec) -> dict[str, Any]:
    """Return peft's options for the embedding and the head that are trained in full."""
    if not lora.modules_to_save:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = {"embed_tokens": embedding, "lm_head": head}
    chosen = [wanted[name] for name in lora.modules_to_save]
    names = [name for name, module in model.named_modules() if any(module is m for m in chosen)]
    is_tied = head.weight is embedding.weight
    if is_tied and not hasattr(model.base_model, "embed_tokens"):
        # peft would train and save two.
        raise TrainingError(
            f"training.lora.modules_to_save: the embedding of {model.config.model_type} is also its"
            " head, under a name that peft does not recognize; use method full, or leave it out"
        )
    return {"modules_to_save": names, "ensure_weight_tying": is_tied}


def name_base(checkpoint: Path, model: ModelRecord) -> None:
    """Record a hub model's id and commit as the adapter's base, so it loads elsewhere."""
    path = checkpoint / ADAPTER_FILE
    if model.kind != "hub" or not path.is_file():
        return
    named = {"base_model_name_or_path": model.name, "revision": model.revision}
    text = json.dumps({**json.loads(path.read_text("utf-8")), **named}, indent=2, sort_keys=True)
    path.write_text(text, encoding="utf-8")


def load_for_training(
    plan: TrainPlan, model: ModelRecord, device: torch.device, *, weights: Path | None = None
) -> Any:
    """Load the base on ``device``: frozen under an adapter, or fully trained.

    ``weights`` is a copy of the model to read; saved files still name the model.
    """
    quantized = plan.method == "qlora"
    net: Any = load_base(
        str(weights or model.path),
        # In fp32, autocast casts trained weights; a frozen base may be in half precision.
        dtype=DTYPES[plan.trained_dtype if plan.method == "full" else plan.precision],
        attention_name=plan.attention,
        quantized=quantized,
        device=device,
    )
    # Not the staged copy, which may be removed: a saved adapter records its base under this name.
    net.name_or_path = net.config.name_or_path = model.path
    # peft's own preparation for 4 bits also casts the rest of the base to fp32, doubling the memory
    # of the embeddings; the norms compute in fp32 anyway.
    if plan.gradient_checkpointing:
        try:
            # Keeps only the inputs of layers; embeddings require gradients even if frozen.
            net.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise TrainingError(
                f"training.gradient_checkpointing: {type(net).__name__} does not support it; set it"
                " to false"
            ) from error
    if plan.lora is not None:
        net = add_adapter(net, plan.lora)
        if plan.lora.init_from is not None:
            load_init_adapter(net, plan.lora, model)
    return net if quantized else net.to(device)


def describe_weights(net: Any, plan: TrainPlan) -> str:
    if plan.method == "full":
        return f"all weights trained, in {plan.trained_dtype}"
    dtypes = {p.dtype for p in net.parameters() if p.requires_grad}
    adapter = ", ".join(sorted(name for name, dtype in DTYPES.items() if dtype in dtypes))
    if plan.method == "lora":
        return f"base frozen in {plan.precision}, adapter in {adapter}"
    n_layers = len(list_quantized_layers(net))
    on_cpu = next(net.parameters()).device.type == "cpu"
    return (
        f"base in NF4, double quantized, {plan.precision} compute: {n_layers} layers; embeddings,"
        f" head and norms in {plan.precision}, adapter in {adapter}"
        f"{'; on the CPU each product dequantizes its weights first' if on_cpu else ''}"
    )


def _with_adapter(model: PreTrainedModel, checkpoint: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(checkpoint), local_files_only=True)


def load_for_scoring(
    checkpoint: Path | None,
    *,
    model: ModelRecord,
    plan: TrainPlan,
    fallbacks: Sequence[Fallback],
    weights: Path | None = None,
) -> Any:
    """Load the base model (null ``checkpoint``) or the trained one on the training device.

    Where training fell back to other attention, the planned one fails here, too, or is wrong.

    A base trained in 4 bits is also scored in 4 bits before training, so that the difference is due
    to training alone.
    """
    device = torch.device("cuda" if plan.gpu is not None else "cpu")
    is_whole = checkpoint is not None and not (checkpoint / ADAPTER_FILE).is_file()
    quantized = plan.method == "qlora"
    used = [plan.attention, *(f.used for f in fallbacks if f.part == "attention")]
    net: Any = load_base(
        str(checkpoint if is_whole else weights or model.path),
        dtype=DTYPES[plan.precision] if plan.gpu is not None else torch.float32,
        attention_name=used[-1],
        quantized=quantized,
        device=device,
    )
    if checkpoint is not None and not is_whole:
        net = _with_adapter(net, checkpoint)
    return (net if quantized else net.to(device)).eval()


def load_for_export(
    checkpoint: Path, *, base: str, method: str, precision: str, attention_name: str
) -> Any:
    """Load the trained model on the CPU: in fp32, with the same 4-bit codes under qlora.

    A model without an adapter keeps the dtype of its file, on which its weights' hash depends.
    """
    if not (checkpoint / ADAPTER_FILE).is_file():
        return load_base(str(checkpoint), dtype="auto", attention_name=attention_name).eval()
    quantized = method == "qlora"
    dtype = DTYPES[precision] if quantized else torch.float32
    net = load_base(base, dtype=dtype, attention_name=attention_name, quantized=quantized)
    if quantized:
        # With the same 4-bit codes, a comparison is not lost in rounding.
        for parameter in net.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        for layer in list_quantized_layers(net).values():
            layer.compute_dtype = torch.float32
            layer.weight.quant_state.dtype = torch.float32
    return _with_adapter(net, checkpoint).eval()


def make_mergeable(model: Any, checkpoint: Path) -> Any:
    """Return the adapter on a base into which it merges without loss.

    If trained on 4 bits, that is the dequantized base, quantization errors included.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return model
    return _with_adapter(_dequantize(model.unload()), checkpoint)


def _dequantize(model: PreTrainedModel) -> PreTrainedModel:
    from bitsandbytes.functional import dequantize_4bit

    for name, layer in list_quantized_layers(model).items():
        # On the meta device: its own weights would be drawn at random, and replaced at once.
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_4bit = False
    return model
