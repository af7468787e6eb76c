"""Read everything once: the cards, this machine's processors, memory and disks."""

import time
from pathlib import Path
from typing import Any

import psutil

from expertflow.hardware.nvml import Gpus
from expertflow.hardware.nvml_device import Device
from expertflow.hardware.records import GpuSample

# The system's table of disks is the dearest thing to read; a little less than a second, so that
# each reading has it where they are a second apart.
DISK_EVERY_S = 0.9


class Sampler:
    """Takes readings; differences are taken to the reading before."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._disk: tuple[int, int] | None = None
        self._disk_due_s = 0.0
        self._is_first = True

    def take(self, *, elapsed_s: float) -> GpuSample:
        """Read everything; the first reading has no shares of time, which need one before."""
        starts, self._is_first = self._is_first, False
        cpu_percent = psutil.cpu_percent(interval=None)
        read, written = self._disk_since()
        devices = self._gpus.devices
        figures = _card_figures(devices[0]) if devices else {}
        together = _together(devices, figures)
        return GpuSample(
            elapsed_s=round(elapsed_s, 3),
            **{**NOTHING, **figures, **together},
            cpu_percent=None if starts else cpu_percent,
            ram_used_bytes=psutil.virtual_memory().used,
            disk_read_bytes=read,
            disk_write_bytes=written,
            starts=starts,
            simulated=self._gpus.simulated,
            lost=devices[0].take_lost() if devices else {},
        )

    def _disk_since(self) -> tuple[int | None, int | None]:
        """Give bytes read and written since the last time; null in readings that come too soon."""
        now_s = time.monotonic()
        if now_s < self._disk_due_s:
            return None, None
        self._disk_due_s = now_s + DISK_EVERY_S
        before, self._disk = self._disk, disk_counters()
        if before is None or self._disk is None:
            return None, None
        return self._disk[0] - before[0], self._disk[1] - before[1]


def disk_counters(blocks: Path = Path("/sys/block")) -> tuple[int, int] | None:
    """Give bytes read and written by real disks; null without counters, as in some containers.

    Volumes over disks (LVM, RAID, loop) count the same bytes again: they have no device, and
    partitions no entry of their own.
    """
    try:
        disks = psutil.disk_io_counters(perdisk=True)
    except NotImplementedError:
        return None
    # A slash in a name is an exclamation mark there.
    names = [name for name in disks if (blocks / name.replace("/", "!") / "device").exists()]
    if not names:
        return None
    return sum(disks[n].read_bytes for n in names), sum(disks[n].write_bytes for n in names)


NOTHING: dict[str, Any] = dict.fromkeys(
    ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w", "energy_j")
)


def _card_figures(device: Device) -> dict[str, Any]:
    return {
        "utilization_percent": device.utilization_percent(),
        "memory_used_bytes": device.memory_used_bytes(),
        "temperature_c": device.temperature_c(),
        "power_w": device.power_w(),
        "energy_j": device.energy_j(),
        "sm_clock_mhz": device.clock_mhz("sm"),
        "memory_clock_mhz": device.clock_mhz("memory"),
        "throttle_reasons": device.throttle_reasons(),
        "violation_s": device.violation_s(),
        **{name: round(value, 2) for name, value in device.counters().items()},
    }


def _together(devices: tuple[Device, ...], first: dict[str, Any]) -> dict[str, float | None]:
    """Add up energy and power over all cards; null where one of them does not tell."""
    if not devices:
        return {}
    energies = [first["energy_j"], *(device.energy_j() for device in devices[1:])]
    powers = [first["power_w"], *(device.power_w() for device in devices[1:])]
    return {"energy_all_j": _sum(energies), "power_all_w": _sum(powers)}


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if len(known) == len(values) else None
