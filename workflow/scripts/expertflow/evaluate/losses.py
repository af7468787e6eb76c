"""Loss of each held-out document by itself, under the model as training runs it.

Shapes: D documents, N rows, B rows of a batch, L tokens, T targets, C targets of a chunk,
V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.ragged import offsets_of
from expertflow.train.feed.batches import Batch, Buffers, Collator
from expertflow.train.model.loss import chunk_rows, targets_of
from expertflow.train.model.packed import causal_lm, head_weight, hidden_states


class DocumentLosses(Record, frozen=True):
    """Summed loss in nats, and number of targets, of each document in the order of the rows.

    A document that was cut over several rows counts once for each.
    """

    nats_D: NDArray[np.float64]
    n_targets_D: NDArray[np.int64]


@torch.inference_mode()
def document_losses(model: Any, rows: PackedRows, *, micro_batch_size: int) -> DocumentLosses:
    """Take the loss of every document in ``rows``.

    The sums agree with ``held_out_loss``, and the losses with those of documents one by one. Only
    some rows of logits exist at a time.
    """
    lm = causal_lm(model)
    training = model.training
    model.eval()
    collator = Collator(rows)
    buffers = Buffers(micro_batch_size, rows.length)
    n_documents = len(rows.seq_lengths.values)
    nats_D, n_targets_D = np.zeros(n_documents), np.zeros(n_documents, np.int64)
    for part in _parts(collator, micro_batch_size):
        batch = collator.batch(part, buffers)
        positions_T, targets_T = targets_of(batch.labels_BL, batch.n_target_tokens)
        nats_T = _target_nats(lm, batch, positions_T, targets_T)
        owners_T = _owners(rows, batch)[positions_T.numpy() + 1]
        np.add.at(nats_D, owners_T, nats_T)
        np.add.at(n_targets_D, owners_T, 1)
    model.train(training)
    return DocumentLosses(nats_D, n_targets_D)


def _parts(collator: Collator, micro_batch_size: int) -> Iterator[NDArray[np.integer]]:
    """Cut the rows that hold targets into batches, those of like length together."""
    order = np.argsort(-collator.n_tokens_N, kind="stable")
    order = order[collator.n_targets_N[order] > 0]
    for start in range(0, len(order), micro_batch_size):
        yield order[start : start + micro_batch_size]


def _target_nats(
    lm: Any, batch: Batch, positions_T: torch.Tensor, targets_T: torch.Tensor
) -> NDArray[np.float64]:
    """Give the loss of every target of a batch, in nats."""
    head_VH = head_weight(lm)
    device = head_VH.device
    hidden_TH = hidden_states(lm, batch).flatten(0, 1).index_select(0, positions_T.to(device))
    targets_T1 = targets_T.to(device)[:, None]
    chunk, nats = chunk_rows(head_VH), []
    for start in range(0, len(targets_T1), chunk):
        part = slice(start, start + chunk)
        logits_CV = torch.nn.functional.linear(hidden_TH[part].to(head_VH.dtype), head_VH).float()
        said_C = logits_CV.gather(1, targets_T1[part])[:, 0]
        nats.append(logits_CV.logsumexp(1) - said_C)
    result: NDArray[np.float64] = torch.cat(nats).cpu().numpy().astype(np.float64)
    return result


def _owners(rows: PackedRows, batch: Batch) -> NDArray[np.int64]:
    """Give for each position of a batch, laid end to end, its document; -1 for padding."""
    n_rows, length = batch.input_ids_BL.shape
    owners = np.full((n_rows, length), -1, np.int64)
    for i, row in enumerate(batch.rows):
        first, last = rows.seq_lengths.offsets[row : row + 2]
        lengths = rows.seq_lengths.values[first:last]
        bounds = offsets_of(lengths)
        owners[i, : bounds[-1]] = np.repeat(np.arange(first, last), lengths)
    return owners.reshape(-1)
