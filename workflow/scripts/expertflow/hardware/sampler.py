"""Sample GPUs, processors, memory and disks, and choose the sampling interval."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct, field

from expertflow.core.files import read_json_lines
from expertflow.hardware.nvml import QUESTIONS, Device, Gpus
from expertflow.hardware.records import GpuSample

# The goal: at least 20 readings per epoch, from one to ten per second. Readings come late on a busy
# machine and epochs differ, so a fifth more are planned (judgment).
SLOW_S, FAST_S, WANTED, SPARE = 1.0, 0.1, 20, 1.2
TAIL_BYTES = 1 << 14

# The system's disk table is the most expensive thing to read; a little less than a second, so that
# each reading has it if they are a second apart.
DISK_EVERY_S = 0.9
# Fields of a reading that are figures of the card.
CARD_FIGURES = [name for name in GpuSample.__struct_fields__ if name in QUESTIONS]


class Sampler:
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._disk: tuple[int, int] | None = None
        self._disk_due_s = 0.0
        self._is_first = True

    def read_sample(self, *, elapsed_s: float) -> GpuSample:
        """Read everything; the first reading has no shares of time, which need an earlier one."""
        starts, self._is_first = self._is_first, False
        cpu_percent = psutil.cpu_percent(interval=None)
        read, written = self._disk_since()
        devices = self._gpus.devices
        return GpuSample(
            elapsed_s=round(elapsed_s, 3),
            **(_card_figures(devices) if devices else {}),
            # psutil answers 0.0 to its first call.
            cpu_percent=None if starts else cpu_percent,
            ram_used_bytes=psutil.virtual_memory().used,
            disk_read_bytes=read,
            disk_write_bytes=written,
            starts=starts,
            simulated=self._gpus.simulated,
            # After the figures above, whose failures it collects.
            lost=devices[0].take_lost() if devices else {},
        )

    def _disk_since(self) -> tuple[int | None, int | None]:
        now_s = time.monotonic()
        if now_s < self._disk_due_s:
            return None, None
        self._disk_due_s = now_s + DISK_EVERY_S
        before, self._disk = self._disk, disk_counters()
        if before is None or self._disk is None:
            return None, None
        return self._disk[0] - before[0], self._disk[1] - before[1]


def disk_counters(blocks: Path = Path("/sys/block")) -> tuple[int, int] | None:
    """Return bytes read and written by real disks, not volumes on them; null if uncounted."""
    try:
        disks = psutil.disk_io_counters(perdisk=True)
    except NotImplementedError:
        return None
    # In /sys/block, a slash in a name is an exclamation mark.
    names = [name for name in disks if (blocks / name.replace("/", "!") / "device").exists()]
    if not names:
        return None
    return sum(disks[n].read_bytes for n in names), sum(disks[n].write_bytes for n in names)


def _card_figures(devices: Sequence[Device]) -> dict[str, Any]:
    first = devices[0]
    figures, _ = first.read_figures(*CARD_FIGURES)
    figures["utilization_percent"] = first.read_figure("any_kernel_percent")
    figures |= {name: round(value, 2) for name, value in first.read_counters().items()}
    for total, name in (("energy_all_j", "energy_j"), ("power_all_w", "power_w")):
        values = [figures[name], *(device.read_figure(name) for device in devices[1:])]
        # A sum that lacks a card would be too low.
        figures[total] = None if None in values else round(sum(values), 3)
    return figures


class SamplingInterval(Struct):
    """Chooses the time to the next reading: ``configured_s``, or at least 20 per epoch.

    Readings are dense until ``steps``, the trainer's log, shows an epoch; without it, one a second.
    """

    configured_s: float | None = None
    steps: Path | None = None
    n_steps_per_epoch: int | None = None
    epoch_s: float | None = None
    _seen: tuple[int, int] = field(default=(0, 0))

    def next_s(self) -> float:
        if self.configured_s is not None:
            return self.configured_s
        if self.steps is None or self.n_steps_per_epoch is None:
            return SLOW_S
        self._update(self.steps, self.n_steps_per_epoch)
        if self.epoch_s is None:
            return FAST_S
        return min(SLOW_S, max(FAST_S, self.epoch_s / (WANTED * SPARE)))

    def list_remarks(self) -> Iterator[str]:
        if self.configured_s is None and self.epoch_s and self.epoch_s < WANTED * FAST_S:
            n = round(self.epoch_s / FAST_S)
            yield (
                f"an epoch takes {self.epoch_s:.2g} s: at most {n} of {WANTED} desired samples, one"
                f" every {FAST_S:g} s"
            )

    def _update(self, path: Path, n_steps: int) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        now = (status.st_size, status.st_mtime_ns)
        if now == self._seen:
            return
        self._seen = now
        # The first line may be incomplete.
        lines = read_json_lines(path, tail_bytes=TAIL_BYTES)
        steps = [x for x in lines if isinstance(x, dict) and {"step", "elapsed_s"} <= x.keys()]
        times = [
            (later["elapsed_s"] - earlier["elapsed_s"]) / (later["step"] - earlier["step"])
            for earlier, later in itertools.pairwise(steps)
            if later["step"] > earlier["step"] and later["elapsed_s"] > earlier["elapsed_s"]
        ]
        if times:
            # A pause for an evaluation or a save does not move the median.
            self.epoch_s = statistics.median(times) * n_steps
