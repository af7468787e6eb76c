"""Sum launches of kernels up by name; what a name stands for is for the report to say."""

from collections import defaultdict
from collections.abc import Iterable

from expertflow.core.records import Record
from expertflow.train.records import Kernel

# What is drawn on the device's time line over the kernels that it stands for.
ANNOTATIONS = ("## ", "Optimizer.", "ProfilerStep")
# Names that are written down, and letters of one: compiled code may have a kernel for each shape.
N_KERNELS, N_CHARS = 1_000, 1_000


class Span(Record, frozen=True, kw_only=True):
    """One launch of a kernel. ``self_us`` is its time without that of what it calls."""

    name: str
    start_us: float
    end_us: float
    self_us: float


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Add up the time in which any of some spans runs.

    >>> busy_us([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def kernel_table(spans: Iterable[Span]) -> tuple[Kernel, ...]:
    """Sum launches up by name, the longest first."""
    n_calls: defaultdict[str, int] = defaultdict(int)
    taken_us: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        n_calls[span.name] += 1
        taken_us[span.name] += span.self_us
    return tuple(
        Kernel(name=name[:N_CHARS], n_calls=n_calls[name], total_s=us / 1e6)
        for name, us in sorted(taken_us.items(), key=lambda item: (-item[1], item[0]))
    )
