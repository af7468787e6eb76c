"""Log the progress of long jobs, so that none is silent for more than ten seconds."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
log = logging.getLogger(__name__)
# The innermost is last, and is the one that is logged.
_activities: list[Callable[[], str]] = []


class ProgressCounter:
    """Counts units of work of a known total."""

    def __init__(self, what: str, *, total: int, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.n_done = 0
        self.started_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def add(self, n: int) -> None:
        self.n_done += n

    def describe(self) -> str:
        share = f"{100 * self.n_done / max(1, self.total):.0f}%"
        text = f"{self.what}: {self.n_done:,} of {self.total:,} {self.unit} ({share})"
        if not self.n_done:
            return text
        rate = self.n_done / self.elapsed_s
        return f"{text}, {rate:,.3g}/s, about {(self.total - self.n_done) / rate:.0f} s left"


@contextmanager
def show_activity(describe: Callable[[], str]) -> Iterator[None]:
    """Describe what the block does, for ``break_silence`` to log."""
    _activities.append(describe)
    try:
        yield
    finally:
        _activities.remove(describe)


class _LastLine(logging.Handler):
    """Remembers when something was last logged."""

    at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        self.at_s = time.monotonic()


@contextmanager
def break_silence(every_s: float = EVERY_S) -> Iterator[None]:
    """Log the current activity whenever the block has logged nothing for some time."""
    last, is_over = _LastLine(), threading.Event()
    start_s = last.at_s = time.monotonic()

    def watch() -> None:
        while not is_over.wait(every_s / 10):
            if time.monotonic() - last.at_s >= every_s:
                what = _activities[-1]() if _activities else "still running"
                log.info("%s, %.0f s after the start", what, time.monotonic() - start_s)

    thread = threading.Thread(target=watch, daemon=True)
    logging.getLogger().addHandler(last)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        logging.getLogger().removeHandler(last)
