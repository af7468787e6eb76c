"""How often to read: as configured, or once a second and often enough for short epochs."""

import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

# Asked for: at least 20 readings an epoch, from once a second to ten times. Readings come late on a
# busy machine and epochs differ, so a fifth more are planned (judgement).
SLOW_S, FAST_S, WANTED, SPARE = 1.0, 0.1, 20, 1.2
TAIL_BYTES = 1 << 14


class Pace(Struct):
    """Chooses the time to the next reading.

    ``configured_s`` is kept to whatever happens. Else ``steps`` is the log that the trainer writes,
    a line a step or a logging interval with ``step`` and ``elapsed_s``; readings are dense until it
    tells how long an epoch takes. Without a trainer they are a second apart.
    """

    configured_s: float | None = None
    steps: Path | None = None
    n_steps_per_epoch: int | None = None
    epoch_s: float | None = None
    _seen: tuple[int, int] = field(default=(0, 0))

    def interval_s(self) -> float:
        """Give the seconds from one reading to the next, as things stand."""
        if self.configured_s is not None:
            return self.configured_s
        if self.steps is None or self.n_steps_per_epoch is None:
            return SLOW_S
        self._look(self.steps, self.n_steps_per_epoch)
        if self.epoch_s is None:
            return FAST_S
        return min(SLOW_S, max(FAST_S, self.epoch_s / (WANTED * SPARE)))

    def remarks(self) -> Iterator[str]:
        """Say where an epoch gets fewer readings than are wanted."""
        if self.configured_s is None and self.epoch_s and self.epoch_s < WANTED * FAST_S:
            n = round(self.epoch_s / FAST_S)
            yield (
                f"an epoch takes {self.epoch_s:.2g} s: at most {n} of the {WANTED} samples wanted,"
                f" at {FAST_S:g} s each"
            )

    def _look(self, path: Path, n_steps: int) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        now = (status.st_size, status.st_mtime_ns)
        if now != self._seen:
            self._seen = now
            step_s = seconds_per_step(tail(path))
            if step_s is not None:
                self.epoch_s = step_s * n_steps


def seconds_per_step(lines: list[dict[str, Any]]) -> float | None:
    """Give the median time of a step, which a pause for an evaluation or a save does not move."""
    times = [
        (later["elapsed_s"] - earlier["elapsed_s"]) / (later["step"] - earlier["step"])
        for earlier, later in itertools.pairwise(lines)
        if later["step"] > earlier["step"] and later["elapsed_s"] > earlier["elapsed_s"]
    ]
    return statistics.median(times) if times else None


def tail(path: Path) -> list[dict[str, Any]]:
    """Read the last lines of a log that is being written; cut ones are left out."""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - TAIL_BYTES))
        lines = stream.read().split(b"\n")
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "step" in value and "elapsed_s" in value:
            found.append(value)
    return found
