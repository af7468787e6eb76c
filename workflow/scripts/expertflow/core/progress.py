"""Print the progress of long jobs; short ones stay silent."""

import time

EVERY_S = 10.0


class ProgressPrinter:
    """Counts units of work of a known total, and prints a line every ten seconds."""

    def __init__(self, what: str, *, total: int, unit: str, every_s: float = EVERY_S) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.n_done = 0
        self.started_s = time.perf_counter()
        self._every_s = every_s
        self._said_s = self.started_s

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def add(self, n: int) -> None:
        self.n_done += n
        if time.perf_counter() - self._said_s < self._every_s:
            return
        self._said_s = time.perf_counter()
        left_s = self.elapsed_s / max(1, self.n_done) * max(0, self.total - self.n_done)
        print(
            f"{self.what}: {self.n_done:,} of {self.total:,} {self.unit}"
            f" ({self.n_done / max(1, self.total):.0%}), about {left_s:.0f} s left",
            flush=True,
        )
