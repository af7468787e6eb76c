"""Make a micro-batch that stands for those of a run: shapes, bounds and targets, no text."""

import math
from collections.abc import Sequence

import torch

from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import Batch


def n_targets_of_row(length: int, supervised_fraction: float) -> int:
    """Give the targets of a row: at least one, and none for its first token."""
    return max(1, min(length - 1, math.ceil(supervised_fraction * length)))


def sample_batch(documents: Sequence[int], n_rows: int, supervised_fraction: float) -> Batch:
    """Make rows of documents of these lengths; the first tokens of each row are supervised."""
    length, n_documents = sum(documents), len(documents) * n_rows
    labels = torch.full((n_rows, length), IGNORE, dtype=torch.int32)
    n_targets = n_targets_of_row(length, supervised_fraction)
    labels[:, 1 : 1 + n_targets] = 0
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in documents])
    bounds = [0]
    for n in [*documents] * n_rows:
        bounds.append(bounds[-1] + n)
    return Batch(
        input_ids_BL=torch.zeros((n_rows, length), dtype=torch.int32),
        position_ids_BL=positions.repeat(n_rows, 1),
        labels_BL=labels,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_documents=n_documents,
        max_length=length,
        n_tokens=n_rows * length,
        n_target_tokens=n_rows * n_targets,
        rows=tuple(range(n_rows)),
    )
