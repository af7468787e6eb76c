"""Make batches from packed rows: each one a pure function of (seed, step).

There is no sampler state to save: after a resume, step 41 sees the rows it would have seen anyway.
Labels, position ids and document bounds are derived here and stored nowhere.

Shapes: B rows, L tokens a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from expertflow.tokens.arrow import PackedRows

IGNORE = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch on the host. ``labels`` are unshifted: position i is the target of i - 1."""

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    labels_BL: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    n_tokens: int
    n_target_tokens: int
    rows: tuple[int, ...]

    @property
    def n_padding_tokens(self) -> int:
        """Count the positions that hold no document."""
        return self.input_ids_BL.numel() - self.n_tokens


@lru_cache(maxsize=2)
def order_of_epoch(n_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """Permute the rows of one epoch; remembered, as every step of it asks."""
    return np.random.default_rng([seed, epoch]).permutation(n_rows)


def rows_of_step(n_rows: int, *, seed: int, step: int, global_batch: int) -> np.ndarray:
    """Give the rows of optimiser step ``step``; an epoch's last batch may be smaller."""
    per_epoch = -(-n_rows // global_batch)
    epoch, index = divmod(step, per_epoch)
    return order_of_epoch(n_rows, seed=seed, epoch=epoch)[index * global_batch :][:global_batch]


def micro_batches(
    rows: PackedRows, chosen: np.ndarray, *, micro_batch_size: int
) -> Iterator[Batch]:
    """Cut the rows of a step into micro-batches."""
    for start in range(0, len(chosen), micro_batch_size):
        yield collate(rows, chosen[start : start + micro_batch_size])


def collate(rows: PackedRows, chosen: np.ndarray) -> Batch:
    """Build one micro-batch.

    Padding is one more document at the end of its row, so that every position belongs to a document
    and shapes stay fixed; its labels are ignored. The first token of a document is never a target.
    """
    ids = rows.input_ids_NL[chosen]
    length = ids.shape[1]
    positions = np.empty_like(ids)
    labels = np.full_like(ids, IGNORE)
    bounds = [0]
    n_tokens = 0
    for i, row in enumerate(chosen.tolist()):
        lengths = rows.seq_lengths[row]
        spans = rows.spans[row]
        for start, end in zip(spans[::2], spans[1::2], strict=True):
            labels[i, start:end] = ids[i, start:end]
        offset = 0
        for n in _with_padding(lengths, length):
            positions[i, offset : offset + n] = np.arange(n)
            labels[i, offset] = IGNORE
            offset += n
            bounds.append(i * length + offset)
        n_tokens += sum(lengths)
    return Batch(
        input_ids_BL=torch.from_numpy(ids.astype(np.int64)),
        position_ids_BL=torch.from_numpy(positions.astype(np.int64)),
        labels_BL=torch.from_numpy(labels.astype(np.int64)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_length=length,
        n_tokens=n_tokens,
        n_target_tokens=int((labels != IGNORE).sum()),
        rows=tuple(chosen.tolist()),
    )


def document_mask(position_ids_BL: torch.Tensor) -> torch.Tensor:
    """Give the [B, 1, L, L] mask that is true where a query may look at a key.

    A position starts a document where it is 0; queries see keys of their own document up to
    themselves.
    """
    document_BL = (position_ids_BL == 0).cumsum(dim=1)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    length = position_ids_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=position_ids_BL.device).tril()
    return (same_BLL & causal_LL)[:, None]


def _with_padding(lengths: list[int], length: int) -> list[int]:
    padding = length - sum(lengths)
    return [*lengths, padding] if padding else lengths
