"""Loss on held-out rows, computed alike during training and in the evaluation."""

from collections.abc import Callable

import numpy as np
import torch

from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Buffers, Collator
from expertflow.train.feed.order import Rows, micro_batch_rows


def alone(sums: torch.Tensor) -> torch.Tensor:
    """Add up over the processes, where there is but one."""
    return sums


@torch.no_grad()
def held_out_loss(
    loss: torch.nn.Module,
    rows: PackedRows,
    *,
    micro_batch_size: int,
    world_size: int = 1,
    rank: int = 0,
    add_up: Callable[[torch.Tensor], torch.Tensor] = alone,
) -> tuple[float, int]:
    """Give the mean loss in nats per target over all rows, and the number of targets.

    ``loss`` is a ``PackedLoss``, wrapped or not. Several processes share the micro-batches and
    ``add_up`` sums over them; all of them run equally many, since a sharded model needs them all.
    """
    training = loss.training
    loss.eval()
    collator = Collator(rows)
    buffers = Buffers(micro_batch_size, rows.length)
    total = torch.zeros((), dtype=torch.float64, device=next(loss.parameters()).device)
    n_targets = 0
    parts = _parts(collator, micro_batch_size)
    for index in range(0, len(parts), world_size):
        mine = index + rank < len(parts)
        batch = collator.batch(parts[index + rank if mine else index], buffers)
        value = loss(batch)
        if mine:
            total += value
            n_targets += batch.n_target_tokens
    loss.train(training)
    loss_sum, all_targets = add_up(torch.stack((total, total.new_tensor(n_targets)))).tolist()
    return loss_sum / all_targets, round(all_targets)


def _parts(collator: Collator, micro_batch_size: int) -> list[Rows]:
    """List the rows of all micro-batches.

    Longest first: rows that are cut to the longest of their batch then share it with their like.
    """
    n_rows = len(collator.rows)
    chosen = np.argsort(-collator.n_tokens_N, kind="stable") if collator.cuts else np.arange(n_rows)
    return list(micro_batch_rows(chosen, micro_batch_size))
