"""Time a run: every second of its clock by activity, and the parts of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from expertflow.core.attempts import process_age_s

# Device events cost little, and their times hardly change from step to step.
SAMPLED_EVERY = 20
PARTS = ("h2d", "forward", "backward", "optimizer")


class Clock:
    """Host seconds by part, and in sampled steps also the device's seconds of the step's parts.

    Wall time starts with the process, imports included, or now. Steps in ``left_out``, slowed by a
    profiler, are not sampled.
    """

    def __init__(
        self,
        earlier: dict[str, float] | None = None,
        *,
        since_process_start: bool = True,
        cuda: bool = False,
    ) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, earlier or {})
        self._earlier_wall = self.seconds.pop("wall", 0.0)
        self._earlier_named = sum(self.seconds.values())
        age_s = process_age_s() if since_process_start else 0.0
        # Not the time of day, which may be set during a run.
        self._start = time.perf_counter() - age_s
        self._cuda, self.left_out = cuda, range(0)
        self._marks: list[tuple[str, Any, Any]] | None = None

    @property
    def wall_s(self) -> float:
        return self._earlier_wall + time.perf_counter() - self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        marks = self._marks if name in PARTS else None
        mark = None if marks is None else mark_time(cuda=self._cuda)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
        if marks is not None:
            marks.append((name, mark, mark_time(cuda=self._cuda)))

    def begin_step(self, step: int) -> None:
        self._marks = [] if is_sampled(step) and step not in self.left_out else None

    def end_step(self) -> Callable[[], dict[str, float]] | None:
        """Return how to read a sampled step's seconds by part, for when the device is done."""
        marks, self._marks = self._marks, None
        if marks is None:
            return None

        def read() -> dict[str, float]:
            seconds = dict.fromkeys(PARTS, 0.0)
            for name, start, end in marks:
                seconds[name] += seconds_between(start, end)
            return seconds

        return read

    def book_startup(self) -> None:
        """Book this session's unnamed time so far as start-up."""
        named = sum(self.seconds.values()) - self._earlier_named
        self.seconds["startup"] += self.wall_s - self._earlier_wall - named

    def totals(self) -> dict[str, float]:
        return {**self.seconds, "wall": self.wall_s}


def is_sampled(step: int) -> bool:
    """Return whether a step, counted from 0, is timed on the device; the first never is."""
    return step % SAMPLED_EVERY == SAMPLED_EVERY // 2


def mark_time(*, cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)
