"""Load models for training and scoring, and hand out hidden states of packed rows."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertflow.core.errors import TrainingError
from expertflow.plan.records import LoraSpec, TrainPlan
from expertflow.train import attention
from expertflow.train.batches import Batch, document_mask
from expertflow.train.loss import summed_loss
from expertflow.train.records import ModelRecord

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Oldest cards that torch's variable-length attention runs on (Ampere); on older ones, and on the
# CPU, every document gets a call of its own.
KERNEL_CAPABILITY = (8, 0)
ADAPTER_FILE = "adapter_config.json"


def load_base(path: str, *, dtype: torch.dtype, attention_name: str) -> PreTrainedModel:
    """Load a model from a directory: safetensors only, no code from outside.

    Raises:
        TrainingError: the directory holds no model that transformers can load.
    """
    attention.register()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention_name,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"model {path}: cannot be loaded ({' '.join(str(error).split())[:200]}); check the"
            " directory"
        ) from error
    return model


def add_adapter(model: PreTrainedModel, lora: LoraSpec) -> Any:
    """Wrap a model with a trainable LoRA or DoRA adapter; the base is frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise TrainingError(
            f"training.lora.targets {', '.join(lora.targets)}: {' '.join(str(error).split())[:160]}"
        ) from error


def load_trained(checkpoint: Path, *, base: str, dtype: torch.dtype, attention_name: str) -> Any:
    """Load what training published: a whole model, or an adapter on its base."""
    if not (checkpoint / ADAPTER_FILE).is_file():
        return load_base(str(checkpoint), dtype=dtype, attention_name=attention_name)
    from peft import PeftModel

    model = load_base(base, dtype=dtype, attention_name=attention_name)
    return PeftModel.from_pretrained(model, str(checkpoint), local_files_only=True)


def load_for_scoring(checkpoint: Path | None, *, model: ModelRecord, plan: TrainPlan) -> Any:
    """Load the base model (null ``checkpoint``) or the trained one, where the plan trains."""
    device = "cuda" if plan.gpu is not None else "cpu"
    dtype = DTYPES[plan.precision] if plan.gpu is not None else torch.float32
    if checkpoint is None:
        net: Any = load_base(model.path, dtype=dtype, attention_name=plan.attention)
    else:
        net = load_trained(checkpoint, base=model.path, dtype=dtype, attention_name=plan.attention)
    return net.to(device).eval()


def causal_lm(model: Any) -> PreTrainedModel:
    """Give the transformers model inside an adapter, or the model itself."""
    inner: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def batch_loss(model: Any, batch: Batch, *, device: torch.device) -> torch.Tensor:
    """Sum the loss of one micro-batch over its targets.

    The head is applied by the loss, on supervised rows only, so it must be a plain linear map.
    """
    lm = causal_lm(model)
    input_ids = batch.input_ids_BL.to(device, non_blocking=True)
    positions = batch.position_ids_BL.to(device, non_blocking=True)
    # Batches travel as int32; only the cross-entropy wants its targets wider.
    labels = batch.labels_BL.to(device, non_blocking=True).long()
    body = lm.base_model
    out = body(
        input_ids=input_ids,
        position_ids=positions,
        use_cache=False,
        **document_kwargs(lm, batch, positions),
    )
    head = lm.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise TrainingError("the model's head is not a plain linear map; use another base model")
    return summed_loss(out.last_hidden_state, head.weight, labels)


def document_kwargs(
    model: PreTrainedModel, batch: Batch, positions: torch.Tensor
) -> dict[str, Any]:
    """Tell attention where documents begin and end, in the form its route needs."""
    if model.config._attn_implementation != attention.NAME:
        return {"attention_mask": additive_mask(positions, model.dtype)}
    half = torch.is_autocast_enabled() or model.dtype != torch.float32
    if positions.is_cuda and half and torch.cuda.get_device_capability() >= KERNEL_CAPABILITY:
        cu_seqlens = batch.cu_seqlens.to(positions.device, non_blocking=True)
        return {"cu_seq_lens_q": cu_seqlens, "max_length_q": batch.max_length}
    return {"document_bounds": tuple(batch.cu_seqlens.tolist())}


def additive_mask(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Give the document mask as 0 and -inf, which the eager kernels add to the scores."""
    mask = document_mask(positions)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Give the trained parameters by name, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_trainable_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Copy trained parameters back.

    Raises:
        TrainingError: the names differ, so the state belongs to another model.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if set(parameters) != set(state):
        raise TrainingError("the saved state has other parameters than the model; remove the state")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def weights_sha256(model: Any) -> str:
    """Hash all trained parameters, bit by bit, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(trainable_state(model).items()):
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
