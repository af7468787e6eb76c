"""A naive loss: fp32 logits of every row, supervised or not."""

from typing import Any

import torch
from torch.nn import functional

from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import Batch
from expertflow.train.model.packed import causal_lm, find_head, hidden_states


class AllRowsLoss(torch.nn.Module):
    """Replaces ``PackedLoss``: the same sum, all logits at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        """Sum the loss of a micro-batch over its targets, as a float32 scalar."""
        lm = causal_lm(self.model)
        hidden_BLH = hidden_states(lm, batch)
        logits_BLV = find_head(lm).compute_logits(hidden_BLH)
        labels_BL = functional.pad(batch.labels_BL[:, 1:], (0, 1), value=IGNORE)
        targets_N = labels_BL.to(hidden_BLH.device).long().flatten()
        return functional.cross_entropy(
            logits_BLV.flatten(0, 1), targets_N, ignore_index=IGNORE, reduction="sum"
        )
