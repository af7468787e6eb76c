"""The loss of a model on packed rows: one batch, or all held-out rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from expertflow.core.errors import TrainingError
from expertflow.core.settings import name_of
from expertflow.plan.settings import ADAPTER, LoraSpec
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Batch, Buffers, Collator, micro_batch_rows
from expertflow.train.model import attention
from expertflow.train.model.loss import (
    Head,
    Kernel,
    loss_and_gradient,
    plain_loss,
    product_dtype,
    sum_loss,
)


class PackedLoss(torch.nn.Module):
    """A model with its loss: the module that a step calls and that distributed wrappers wrap."""

    def __init__(self, model: Any, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        # None computes the loss by torch's own operations.
        self.kernel: Kernel | None = loss_and_gradient
        # A new module is in training mode, whatever it wraps.
        self.train(model.training)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Sum the loss of one micro-batch over its targets, as a float32 scalar.

        The loss applies the head itself, to supervised rows only. Labels are smoothed in training
        only.
        """
        lm = causal_lm(self.model)
        labels = batch.labels_BL.to(next(lm.parameters()).device, non_blocking=True)
        smoothing = self.label_smoothing if self.training else 0.0
        inputs = hidden_states(lm, batch), find_head(lm), labels
        if self.kernel is None:
            return plain_loss(*inputs, label_smoothing=smoothing)
        return sum_loss(
            *inputs,
            n_targets=batch.n_target_tokens,
            label_smoothing=smoothing,
            kernel=self.kernel,
        )


def causal_lm(model: Any) -> PreTrainedModel:
    inner: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def decoder_layers(lm: PreTrainedModel) -> list[torch.nn.Module]:
    return [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)]


def hidden_states(lm: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Run the model without its head; return [B, L, H]."""
    device = next(lm.parameters()).device
    positions = batch.position_ids_BL.to(device, non_blocking=True)
    out = lm.base_model(
        input_ids=batch.input_ids_BL.to(device, non_blocking=True),
        position_ids=positions,
        # transformers 5.23 tells documents apart by their positions only without a cache object.
        use_cache=False,
        **document_kwargs(lm, batch, positions),
    )
    hidden: torch.Tensor = out.last_hidden_state
    return hidden


def find_head(lm: PreTrainedModel) -> Head:
    """Return the head with the config's scale and cap; reject any other kind of head."""
    head = lm.get_output_embeddings()
    # If trained in full next to an adapter, it is wrapped by peft.
    copies = getattr(head, name_of(LoraSpec.modules_to_save), None)
    head = head if copies is None else copies[ADAPTER]
    if not isinstance(head, torch.nn.Linear) or not head.weight.is_floating_point():
        raise TrainingError(
            f"the head of {lm.config.model_type} is {type(head).__name__}, not a plain linear"
            " layer; remove it from training.lora.targets, or use another base model"
        )
    config = lm.config.get_text_config()
    # Cohere multiplies, Granite divides, Gemma 2 caps.
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(head.weight, head.bias, float(scale), None if cap is None else float(cap))


def document_kwargs(
    lm: PreTrainedModel, batch: Batch, positions: torch.Tensor
) -> dict[str, object]:
    device, dtype = positions.device, product_dtype(positions.device, lm.dtype)
    if lm.config._attn_implementation != attention.NAME:
        return {}
    caps = attention.caps_scores(lm.config)
    if attention.varlen_unavailable_reason(device, dtype, caps) is None:
        return {"cu_seq_lens_q": document_bounds(batch, device), "max_length_q": batch.max_length}
    return {"document_bounds": document_bounds(batch, batch.cu_seqlens.device)}


def document_bounds(batch: Batch, device: torch.device) -> torch.Tensor:
    """Return the bounds of documents; layers compiled once accept any number of them."""
    bounds = batch.cu_seqlens.to(device, non_blocking=True)
    if batch.n_bounds is None:
        torch._dynamo.maybe_mark_dynamic(bounds, 0)
        return bounds
    # Bounds [0, 5, 8] of 8 tokens with n_bounds 5 -> [0, 5, 8, 8, 8]: two empty documents.
    n_empty = batch.n_bounds - len(bounds)
    return torch.nn.functional.pad(bounds, (0, n_empty), value=batch.input_ids_BL.numel())


@torch.no_grad()
def compute_held_out_loss(
    loss: torch.nn.Module,
    rows: PackedRows,
    *,
    micro_batch_size: int,
    world_size: int = 1,
    rank: int = 0,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
    before_batch: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Return the mean loss in nats per target over all rows, and the number of targets.

    ``loss`` is a ``PackedLoss`` in evaluation mode, wrapped or not. Processes share the
    micro-batches and ``add_up`` sums over them; all run equally many, as a sharded model requires.
    """
    collator = Collator(rows)
    buffers = Buffers(micro_batch_size, rows.length)
    # In fp64, so that the sum hardly depends on how many processes share it.
    total = torch.zeros((), dtype=torch.float64, device=next(loss.parameters()).device)
    n_targets = 0
    # Longest first, so that rows cut to the longest of their batch share it with similar ones.
    n_rows = len(rows)
    chosen = np.argsort(-collator.n_tokens_N, kind="stable") if collator.cuts else np.arange(n_rows)
    # A micro-batch without targets, such as the start of a long question, would add exactly 0.
    every = micro_batch_rows(chosen, micro_batch_size)
    parts = [rows_B for rows_B in every if collator.n_targets_N[rows_B].any()]
    for index in range(0, len(parts), world_size):
        before_batch()
        mine = index + rank < len(parts)
        # A process without its own batch repeats another one and does not count it.
        batch = collator.batch(parts[index + rank if mine else index], buffers)
        value = loss(batch)
        if mine:
            total += value
            n_targets += batch.n_target_tokens
    loss_sum, all_targets = add_up(torch.stack((total, total.new_tensor(n_targets)))).tolist()
    return loss_sum / all_targets, round(all_targets)
