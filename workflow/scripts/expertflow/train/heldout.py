"""Loss on held-out rows, computed alike during training and in the evaluation."""

from typing import Any

import numpy as np
import torch

from expertflow.tokens.arrow import PackedRows
from expertflow.train.batches import Buffers, Collator
from expertflow.train.model import batch_loss
from expertflow.train.order import micro_batch_rows


@torch.no_grad()
def held_out_loss(
    model: Any, rows: PackedRows, *, micro_batch_size: int, device: torch.device
) -> tuple[float, int]:
    """Give the mean loss in nats per target over all rows, and the number of targets."""
    training = model.training
    model.eval()
    total, n_targets = 0.0, 0
    collator = Collator(rows)
    # Longest first: rows that are cut to the longest of their batch then share it with their like.
    chosen = (
        np.argsort(-collator.n_tokens_N, kind="stable") if collator.cuts else np.arange(len(rows))
    )
    buffers = Buffers(micro_batch_size, rows.length)
    for part in micro_batch_rows(chosen, micro_batch_size):
        batch = collator.batch(part, buffers)
        if batch.n_target_tokens:
            total += float(batch_loss(model, batch, device=device))
            n_targets += batch.n_target_tokens
    model.train(training)
    return total / n_targets, n_targets
