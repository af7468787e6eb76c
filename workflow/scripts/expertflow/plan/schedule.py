"""Decide steps, epochs and warm-up from the number of rows, each with its reason."""

import math

from expertflow.plan.settings import Training


def choose_warmup(settings: Training, n_steps: int) -> tuple[int, str]:
    """Return the number of warm-up steps, always below the number of steps.

    >>> choose_warmup(Training(), 66)
    (7, '0.1 x 66 steps = 6.6, rounded; warmup_steps_min 10 gives way to the ratio')
    >>> choose_warmup(Training(override_min_warmup=False), 66)
    (10, '0.1 x 66 steps = 6.6; warmup_steps_min is 10')
    """
    ratio, minimum = settings.warmup_ratio, settings.warmup_steps_min
    maximum, wanted = settings.warmup_steps_max, round(settings.warmup_ratio * n_steps)
    high = min(maximum, n_steps - 1)
    low = min(minimum, high)
    if settings.override_min_warmup:
        low = min(low, math.floor(ratio * n_steps))
    warmup = max(low, min(wanted, high))
    base = f"{ratio:.3g} x {n_steps} steps = {ratio * n_steps:.3g}"
    if warmup == wanted:
        rule = f"; warmup_steps_min {minimum} gives way to the ratio" if warmup < minimum else ""
        return warmup, f"{base}, rounded{rule}"
    if warmup > wanted:
        return warmup, f"{base}; warmup_steps_min is {minimum}"
    bound = f"warmup_steps_max is {maximum}" if warmup == maximum else "fewer than the steps"
    return warmup, f"{base}; {bound}"


def choose_steps(settings: Training, per_epoch: int, *, tokens_per_epoch: int) -> tuple[int, str]:
    if settings.max_steps is not None:
        return settings.max_steps, f"max_steps is {settings.max_steps}"
    epochs = settings.num_train_epochs
    reason = f"{epochs:g} epochs of {per_epoch} steps"
    if settings.target_tokens is not None:
        least, most = settings.min_epochs or 0.0, settings.max_epochs or math.inf
        epochs = min(max(settings.target_tokens / tokens_per_epoch, least), most)
        reason = f"{settings.target_tokens} target tokens are {epochs:.2f} epochs"
    return max(1, math.ceil(epochs * per_epoch - 1e-9)), reason
