"""Answer multiple-choice questions by likelihood: nothing is generated."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from expertflow.evaluate.ask import Held, Pair
from expertflow.evaluate.generate import Answer
from expertflow.evaluate.likelihood import log_likelihoods


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
