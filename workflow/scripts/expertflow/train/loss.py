"""Cross-entropy over supervised tokens only.

The rows of the hidden states whose successor is a target are selected *before* the head, so the
vocabulary-wide product runs on them alone. Losses are sums: the caller divides by the number of
targets of the whole global batch, which a mean of micro-batch means would get wrong.

Shapes: B rows, L tokens, H width, T targets, V vocabulary.
"""

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from expertflow.tokens.targets import IGNORE

# Above so many logits they are not kept for the backward pass but computed again, chunk by chunk:
# at a vocabulary of 152k kept logits cost about 1.7 MB a token.
KEPT_LOGITS = 1 << 24
CHUNK = 256


def targets_of(labels_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the flat positions that predict a target, and the targets, both [T]."""
    shifted_BL = functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORE)
    positions_T = (shifted_BL.reshape(-1) != IGNORE).nonzero().squeeze(1)
    return positions_T, shifted_BL.reshape(-1)[positions_T]


def summed_loss(
    hidden_BLH: torch.Tensor, head_VH: torch.Tensor, labels_BL: torch.Tensor
) -> torch.Tensor:
    """Sum the cross-entropy in nats over all targets, as a float32 scalar."""
    positions_T, targets_T = targets_of(labels_BL)
    hidden_TH = hidden_BLH.reshape(-1, hidden_BLH.shape[-1])[positions_T]
    if head_VH.shape[0] * targets_T.numel() <= KEPT_LOGITS:
        return _plain(hidden_TH, head_VH, targets_T)
    total = hidden_TH.new_zeros((), dtype=torch.float32)
    for start in range(0, targets_T.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        total = total + checkpoint(
            _plain, hidden_TH[part], head_VH, targets_T[part], use_reentrant=False
        )
    return total


def _plain(hidden_TH: torch.Tensor, head_VH: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    logits_TV = functional.linear(hidden_TH, head_VH).float()
    return functional.cross_entropy(logits_TV, targets_T, reduction="sum")
