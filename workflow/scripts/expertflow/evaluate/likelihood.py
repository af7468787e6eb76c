"""Exact losses of held-out documents and likelihoods of given texts.

Multiple-choice questions are answered by likelihood, without generation. Shapes: D documents, N
rows, B rows of a batch, L tokens, T targets, C targets of a chunk, V vocabulary.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.evaluate.generate import Answer, positions_of, shrink_batches
from expertflow.evaluate.questions import EvalExample, Pair
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Batch, Buffers, Collator
from expertflow.train.model.loss import chunk_rows, targets_of
from expertflow.train.model.packed import causal_lm, find_head, hidden_states

log = logging.getLogger(__name__)


class DocumentLosses(Record, frozen=True):
    """Summed nats and targets by document, in row order; one cut across rows is in each."""

    nats_D: NDArray[np.float64]
    n_targets_D: NDArray[np.int64]


@torch.inference_mode()
def document_losses(model: Any, rows: PackedRows, *, micro_batch_size: int) -> DocumentLosses:
    """Compute the loss of every document in ``rows``; the sums agree with ``held_out_loss``."""
    lm = causal_lm(model)
    collator = Collator(rows)
    buffers = Buffers(micro_batch_size, rows.length)
    n_documents = len(rows.seq_lengths.values)
    nats_D, n_targets_D = np.zeros(n_documents), np.zeros(n_documents, np.int64)
    # Rows with targets, grouped by similar length.
    # Longest first, so that running out of memory happens at the start.
    order = np.argsort(-collator.n_tokens_N, kind="stable")
    order = order[collator.n_targets_N[order] > 0]
    for start in range(0, len(order), micro_batch_size):
        batch = collator.batch(order[start : start + micro_batch_size], buffers)
        positions_T, targets_T = targets_of(batch.labels_BL, batch.n_target_tokens)
        nats_T = _target_nats(lm, batch, positions_T, targets_T)
        # A position predicts the next token, whose document owns the loss.
        owners_T = _owners(rows, batch)[positions_T.numpy() + 1]
        np.add.at(nats_D, owners_T, nats_T)
        np.add.at(n_targets_D, owners_T, 1)
    return DocumentLosses(nats_D, n_targets_D)


def _target_nats(
    lm: Any, batch: Batch, positions_T: torch.Tensor, targets_T: torch.Tensor
) -> NDArray[np.float64]:
    head = find_head(lm)
    device, dtype = head.weight_VH.device, head.weight_VH.dtype
    hidden_TH = hidden_states(lm, batch).flatten(0, 1).index_select(0, positions_T.to(device))
    targets_T1 = targets_T.to(device)[:, None]
    # In chunks: the logits of all targets, [T, V], take gigabytes with a large vocabulary.
    chunk, nats = chunk_rows(head.weight_VH), []
    for start in range(0, len(targets_T1), chunk):
        part = slice(start, start + chunk)
        logits_CV = head.compute_logits(hidden_TH[part].to(dtype))
        target_logits_C = logits_CV.gather(1, targets_T1[part])[:, 0]
        nats.append(logits_CV.logsumexp(1) - target_logits_C)
    result: NDArray[np.float64] = torch.cat(nats).cpu().numpy().astype(np.float64)
    return result


def _owners(rows: PackedRows, batch: Batch) -> NDArray[np.int64]:
    """Return the document of each position of a flattened batch, -1 for padding."""
    owners = np.full(batch.input_ids_BL.shape, -1, np.int64)
    for i, row in enumerate(batch.rows):
        first, last = rows.seq_lengths.offsets[row : row + 2]
        lengths = rows.seq_lengths.values[first:last]
        owners[i, : lengths.sum()] = np.repeat(np.arange(first, last), lengths)
    return owners.reshape(-1)


def log_likelihoods(
    model: Any, pairs: Sequence[Pair], *, pad_id: int, batch_size: int
) -> list[tuple[float, int]]:
    """Return ln p of each continuation given its prompt, and its number of tokens.

    This is the training loss with its sign flipped, on one row per pair. Prompts have at least one
    token. A pair that exceeds the model's positions gets minus infinity.

    Raises EvaluationError if a single pair does not fit into memory.
    """
    n_positions = positions_of(causal_lm(model).config)
    lengths = [len(prompt) + len(continuation) for prompt, continuation in pairs]
    fits = [i for i, n in enumerate(lengths) if n_positions is None or n <= n_positions]
    found = [(-math.inf, len(continuation)) for _prompt, continuation in pairs]
    if len(fits) < len(pairs):
        log.warning(
            "%d of %d texts are longer than the model's %d positions; their likelihood is 0",
            len(pairs) - len(fits), len(pairs), n_positions,
        )  # fmt: skip
    if not fits:
        return found
    ids = np.full((len(fits), max(lengths[i] for i in fits)), pad_id, np.int32)
    spans: list[list[int]] = []
    for row, i in zip(ids, fits, strict=True):
        prompt, continuation = pairs[i]
        row[: lengths[i]] = prompt + continuation
        # As in training, the loss covers only the continuation.
        spans.append([len(prompt), lengths[i]] if continuation else [])
    rows = PackedRows.from_lists(ids, [[lengths[i]] for i in fits], spans)
    losses = shrink_batches(
        lambda n: document_losses(model, rows, micro_batch_size=n), min(batch_size, len(fits))
    )
    sums = zip(fits, losses.nats_D.tolist(), losses.n_targets_D.tolist(), strict=True)
    for i, nats, n in sums:
        found[i] = -nats, n
    return found


def choose_options(
    model: Any, asked: Sequence[EvalExample], *, pad_id: int, batch_size: int
) -> list[Answer]:
    """Answer each question with the option of highest mean likelihood per token; the first of ties.

    The mean includes the end of the turn, so neither a short option nor a prefix of another one has
    an advantage. If an option exceeds the model's positions, nothing is chosen and ``not_asked``
    says so.
    """
    pairs = [pair for one in asked for pair in one.options.values()]
    found = iter(log_likelihoods(model, pairs, pad_id=pad_id, batch_size=batch_size))
    answers = []
    for one in asked:
        means = [nats / n for nats, n in (next(found) for _ in one.options)]
        text, why = list(one.options)[int(np.argmax(means))], None
        if -math.inf in means:
            n = max(len(given) + len(option) for given, option in one.options.values())
            why = f"prompt and option have {n} tokens, more than the model's positions"
            text = ""
        answers.append(Answer(text, ended=True, not_asked=why))
    return answers
