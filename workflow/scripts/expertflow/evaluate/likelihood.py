"""How likely a model finds given continuations of given prompts: exact, never sampled."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from expertflow.evaluate.generate import halved, positions_of
from expertflow.evaluate.losses import document_losses
from expertflow.tokens.arrow import PackedRows, packed_rows
from expertflow.train.model.packed import causal_lm

log = logging.getLogger(__name__)


def log_likelihoods(
    model: Any,
    pairs: Sequence[tuple[list[int], list[int]]],
    *,
    pad_id: int,
    batch_size: int,
) -> list[tuple[float, int]]:
    """Give ln p of each continuation after its prompt, and its number of tokens.

    Each pair is a row of its own in which the continuation is what is learned, so this is the loss
    of training with its sign turned. Prompts hold one token at least. What the model has no
    position for it cannot write: minus infinity.

    Raises:
        EvaluationError: one pair alone does not fit into memory.
    """
    n_positions = positions_of(causal_lm(model).config)
    lengths = [len(prompt) + len(continuation) for prompt, continuation in pairs]
    fits = [i for i, n in enumerate(lengths) if n_positions is None or n <= n_positions]
    if len(fits) < len(pairs):
        log.warning(
            "%d of %d texts are longer than the model's %d positions; their likelihood is 0",
            len(pairs) - len(fits), len(pairs), n_positions,
        )  # fmt: skip
    found = [(-math.inf, len(continuation)) for _prompt, continuation in pairs]
    sums = _sums(model, [pairs[i] for i in fits], pad_id, batch_size)
    for i, pair_sum in zip(fits, sums, strict=True):
        found[i] = pair_sum
    return found


def _sums(
    model: Any, pairs: list[tuple[list[int], list[int]]], pad_id: int, batch_size: int
) -> list[tuple[float, int]]:
    if not pairs:
        return []
    rows = _rows(pairs, pad_id)
    while True:
        try:
            losses = document_losses(model, rows, micro_batch_size=batch_size)
            break
        except RuntimeError as error:
            batch_size = halved(min(batch_size, len(pairs)), error)
    counts = losses.n_targets_D.tolist()
    return [(-nats, n) for nats, n in zip(losses.nats_D.tolist(), counts, strict=True)]


def _rows(pairs: Sequence[tuple[list[int], list[int]]], pad_id: int) -> PackedRows:
    lengths = [len(prompt) + len(continuation) for prompt, continuation in pairs]
    ids = np.full((len(pairs), max(lengths)), pad_id, np.int32)
    for row, (prompt, continuation) in zip(ids, pairs, strict=True):
        row[: len(prompt) + len(continuation)] = prompt + continuation
    spans = [
        [len(prompt), n] if continuation else []
        for (prompt, continuation), n in zip(pairs, lengths, strict=True)
    ]
    return packed_rows(ids, [[n] for n in lengths], spans)
