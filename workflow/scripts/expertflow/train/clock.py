"""Book every second of a run under one name."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def process_age_s() -> float:
    """Give the seconds since this process was started, to the kernel's tick (0.01 s)."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        # Not Linux. There psutil would be up to 1 s off: it counts from the whole second of boot.
        return time.time() - psutil.Process().create_time()
    # Field 22, the start in ticks since boot; field 2, a name in brackets, may hold anything.
    n_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - n_ticks / os.sysconf("SC_CLK_TCK")


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
