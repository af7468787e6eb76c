"""Book every second of a run under one name."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def process_age_s() -> float:
    """Give the seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


class Clock:
    """Host seconds by part.

    Wall time starts when the process started, imports included, or now where the process has been
    at it before.
    """

    def __init__(
        self, earlier: dict[str, float] | None = None, *, since_process_start: bool = True
    ) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, earlier or {})
        self._earlier_wall = self.seconds.pop("wall", 0.0)
        self._earlier_named = sum(self.seconds.values())
        age_s = process_age_s() if since_process_start else 0.0
        self._start = time.perf_counter() - age_s

    @property
    def wall_s(self) -> float:
        """Give the seconds since the process started, plus those of earlier sessions."""
        return self._earlier_wall + time.perf_counter() - self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Book the seconds of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def started(self) -> None:
        """Book what this session did so far under no name as start-up."""
        named = sum(self.seconds.values()) - self._earlier_named
        self.seconds["startup"] += self.wall_s - self._earlier_wall - named

    def totals(self) -> dict[str, float]:
        """Give all parts and the wall time, for a checkpoint."""
        return {**self.seconds, "wall": self.wall_s}
