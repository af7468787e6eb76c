"""The loss of a packed batch under a model: documents apart, the head on supervised rows only."""

from typing import Any

import torch
from transformers import PreTrainedModel

from expertflow.core.errors import TrainingError
from expertflow.train import attention
from expertflow.train.batches import Batch, document_mask
from expertflow.train.loss import summed_loss

# Oldest cards that torch's variable-length attention runs on (Ampere); on older ones, and on the
# CPU, every document gets a call of its own.
KERNEL_CAPABILITY = (8, 0)


class PackedLoss(torch.nn.Module):
    """A model with its loss: what is called in a step, and wrapped for several processes."""

    def __init__(self, model: Any, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, batch: Batch) -> torch.Tensor:
        """Sum the loss of one micro-batch over its targets, as a float32 scalar.

        The head is applied by the loss, on supervised rows only, so it must be a plain linear map.
        Labels are smoothed in training only.
        """
        lm = causal_lm(self.model)
        device = next(lm.parameters()).device
        input_ids = batch.input_ids_BL.to(device, non_blocking=True)
        positions = batch.position_ids_BL.to(device, non_blocking=True)
        # Batches travel as int32; only the cross-entropy wants its targets wider.
        labels = batch.labels_BL.to(device, non_blocking=True).long()
        out = lm.base_model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            **document_kwargs(lm, batch, positions),
        )
        head = lm.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise TrainingError(
                "the model's head is not a plain linear map; use another base model"
            )
        return summed_loss(out.last_hidden_state, head.weight, labels)


def causal_lm(model: Any) -> PreTrainedModel:
    """Give the transformers model inside an adapter, or the model itself."""
    inner: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


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
