"""Loss on held-out rows, computed alike during training and in the evaluation."""

from typing import Any

import numpy as np
import torch

from expertflow.tokens.arrow import PackedRows
from expertflow.train.batches import micro_batches
from expertflow.train.model import batch_loss


@torch.no_grad()
def held_out_loss(
    model: Any, rows: PackedRows, *, micro_batch_size: int, device: torch.device
) -> tuple[float, int]:
    """Give the mean loss in nats per target over all rows, and the number of targets."""
    training = model.training
    model.eval()
    total, n_targets = 0.0, 0
    chosen = np.arange(len(rows))
    for batch in micro_batches(rows, chosen, micro_batch_size=micro_batch_size):
        if batch.n_target_tokens:
            total += float(batch_loss(model, batch, device=device))
            n_targets += batch.n_target_tokens
    model.train(training)
    return total / n_targets, n_targets
