"""Read the figures of a claim: a progress bar's time, and numbers that a run can have."""

import math
import re

from msgspec.structs import fields

from expertflow.core.errors import ConfigError
from expertflow.plan.cost_records import Claim

# What a claim may say 0 of; all its other figures are above 0.
MAY_BE_ZERO = {
    "usd_per_hour", "usd", "parts_hours", "n_saves_after", "gain_percent", "n_warmup_steps",
    "warmup_ratio", "warmup_steps_min",
}  # fmt: skip


def check_figures(claim: Claim) -> None:
    """Refuse figures that no run can have.

    Raises:
        ConfigError: one is negative, or 0 where it may not be, or a duration is of another form.
    """
    for field in fields(claim):
        value = getattr(claim, field.name)
        for figure in value if isinstance(value, tuple) else (value,):
            if isinstance(figure, int | float):
                _check_figure(field.name, figure)
    if claim.duration is not None:
        _check_figure("duration", parse_duration(claim.duration))


def _check_figure(key: str, figure: float) -> None:
    zero = key in MAY_BE_ZERO
    if not math.isfinite(figure) or figure < 0 or (figure == 0 and not zero):
        least = "at least 0" if zero else "above 0"
        raise ConfigError(f"the claim's {key} is {figure:g}; give a number {least}, or none")


def parse_duration(text: str) -> float:
    """Give the hours of a duration as a progress bar prints it.

    >>> parse_duration("1:30:00")
    1.5

    Raises:
        ConfigError: it is not of the form 46:47 or 1:46:47.
    """
    if not re.fullmatch(r"(\d+:)?[0-5]?\d:[0-5]\d", text):
        raise ConfigError(
            f"duration {text!r} is neither minutes:seconds nor hours:minutes:seconds, both below"
            " 60; write it as 46:47 or 1:46:47"
        )
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds / 3600
