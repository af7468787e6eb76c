"""Time the parts of a step: on the host always, on the device in one step of twenty."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from expertflow.train.clock import Clock

# Device events cost little, and what they say does not change from step to step.
SAMPLED_EVERY = 20
PARTS = ("h2d", "forward", "backward", "optimizer")


def is_sampled(step: int) -> bool:
    """Tell whether a step, counted from 0, is timed on the device; the first never is.

    >>> [step for step in range(40) if is_sampled(step)]
    [10, 30]
    """
    return step % SAMPLED_EVERY == SAMPLED_EVERY // 2


class StepTimer:
    """Books the host seconds of every part; in sampled steps also those of the device.

    On a CPU the host is the device. On a GPU the host runs ahead, so only events tell; they are
    read when the losses are fetched anyway. Steps in ``left_out`` are not sampled: a profiler is at
    work there, and their seconds are not those of the others.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._cuda = clock, device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] | None = None
        self.left_out = range(0)

    def begin(self, step: int) -> None:
        """Begin a step, counted from 0."""
        self._marks = [] if is_sampled(step) and step not in self.left_out else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block as a part of the step."""
        start = self._mark()
        with self._clock.part(name):
            yield
        if self._marks is not None:
            self._marks.append((name, start, self._mark()))

    def end(self) -> Callable[[], dict[str, float]] | None:
        """Give what reads the seconds of the parts once the device is done; null if not sampled."""
        marks, self._marks = self._marks, None
        return None if marks is None else lambda: self._read(marks)

    def _mark(self) -> Any:
        if self._marks is None:
            return None
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self, marks: list[tuple[str, Any, Any]]) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, start, end in marks:
            seconds[name] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        return seconds
