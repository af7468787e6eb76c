"""How likely a model finds given continuations of given prompts: exact, never sampled.

Multiple-choice questions are answered by it: nothing is generated.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from expertflow.evaluate.ask import Held, Pair
from expertflow.evaluate.generate import Answer, halved, positions_of
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


def choose_options(
    model: Any, asked: Sequence[Held], *, pad_id: int, batch_size: int
) -> list[Answer]:
    """Give for each question the option with the highest likelihood a token, as an answer.

    The mean over its tokens and the end of the turn, so that neither a short option nor the
    beginning of another one has an advantage; the first of equals. Where the model has no position
    for one of the options, nothing is chosen and ``hindrance`` says so.
    """
    pairs = [pair for held in asked for pair in held.options.values()]
    found = iter(log_likelihoods(model, pairs, pad_id=pad_id, batch_size=batch_size))
    return [
        _chosen(held.options, [nats / n for nats, n in (next(found) for _ in held.options)])
        for held in asked
    ]


def _chosen(options: dict[str, Pair], means: list[float]) -> Answer:
    if -math.inf in means:
        longest = max(len(given) + len(option) for given, option in options.values())
        why = (
            f"the {longest} tokens of the prompt with an option are more than the model's positions"
        )
        return Answer("", 0, ended=True, hindrance=why)
    return Answer(list(options)[int(np.argmax(means))], 0, ended=True)
