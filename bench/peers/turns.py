"""Turns, medians and ratios of lines measured side by side on a shared machine.

Each repeat runs every line once, and every other repeat in the opposite order, so that a machine
that slows down or warms up affects all of them equally. Ratios are taken within a repeat.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A median with the lowest and highest value."""

    median: float
    least: float
    most: float
    n: int


def turns(lines: Sequence[str], n_repeats: int) -> list[tuple[int, str]]:
    """Return the order of runs: repeat and line, e.g. ours, peer, peer, ours."""
    order = []
    for repeat in range(n_repeats):
        order += [(repeat, line) for line in (lines if repeat % 2 == 0 else lines[::-1])]
    return order


def spread(values: Sequence[float]) -> Spread:
    return Spread(
        median=statistics.median(values), least=min(values), most=max(values), n=len(values)
    )


def ratios(first: dict[int, float], second: dict[int, float]) -> Spread | None:
    """Compare two lines by the repeats that both have; null if there are none."""
    both = sorted(first.keys() & second.keys())
    return spread([first[repeat] / second[repeat] for repeat in both]) if both else None


def format_spread(value: dict[str, float] | None) -> str:
    """Format the fields of a ``Spread``: the median with its least and most."""
    return f"{value['median']:.2f} ({value['least']:.2f}-{value['most']:.2f})" if value else "-"
