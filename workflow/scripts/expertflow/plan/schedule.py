"""Decide steps, epochs and warm-up from the number of rows."""

import math


def warmup_steps(
    n_steps: int, *, ratio: float, minimum: int, maximum: int, override_minimum: bool
) -> int:
    """Give the number of warm-up steps, always below the number of steps.

    >>> warmup_steps(66, ratio=0.1, minimum=10, maximum=1000, override_minimum=True)
    7
    >>> warmup_steps(66, ratio=0.1, minimum=10, maximum=1000, override_minimum=False)
    10
    """
    high = min(maximum, n_steps - 1)
    wanted = round(ratio * n_steps)
    low = min(minimum, high)
    if override_minimum:
        low = min(low, math.floor(ratio * n_steps))
    return max(low, min(wanted, high))


def warmup_reason(n_steps: int, warmup: int, *, ratio: float, minimum: int, maximum: int) -> str:
    """Say how the number of warm-up steps came about."""
    wanted = round(ratio * n_steps)
    base = f"{ratio:.3g} x {n_steps} steps = {ratio * n_steps:.3g}"
    if warmup == wanted:
        rule = f"; warmup_steps_min {minimum} gives way to the ratio" if warmup < minimum else ""
        return f"{base}, rounded{rule}"
    if warmup > wanted:
        return f"{base}; warmup_steps_min is {minimum}"
    bound = f"warmup_steps_max is {maximum}" if warmup == maximum else "fewer than the steps"
    return f"{base}; {bound}"


def steps_per_epoch(n_sequences: int, global_batch_sequences: int) -> int:
    """Count optimiser steps of one pass; the last one may be smaller."""
    return -(-n_sequences // global_batch_sequences)


def n_steps(
    *,
    per_epoch: int,
    tokens_per_epoch: int,
    num_train_epochs: float,
    max_steps: int | None,
    target_tokens: int | None,
    min_epochs: float | None,
    max_epochs: float | None,
) -> tuple[int, str]:
    """Give the number of steps and the sentence that explains it."""
    if max_steps is not None:
        return max_steps, f"max_steps is {max_steps}"
    if target_tokens is not None:
        epochs = target_tokens / tokens_per_epoch
        epochs = min(max(epochs, min_epochs or 0.0), max_epochs or math.inf)
        reason = f"{target_tokens} target tokens are {epochs:.2f} epochs"
    else:
        epochs, reason = num_train_epochs, f"{num_train_epochs:g} epochs of {per_epoch} steps"
    return max(1, math.ceil(epochs * per_epoch - 1e-9)), reason
