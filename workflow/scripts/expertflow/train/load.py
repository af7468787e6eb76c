"""Load models for training and scoring."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertflow.core.errors import TrainingError
from expertflow.plan.records import LoraSpec, TrainPlan
from expertflow.train import attention
from expertflow.train.records import ModelRecord

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
