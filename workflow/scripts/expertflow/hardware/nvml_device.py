"""One NVIDIA card, asked through NVML.

A figure that a driver does not support is null with its reason and not asked for again. One that
fails for once (a timeout, a card in reset) is null in that reading only, and counted.
"""

import time
from collections.abc import Callable
from typing import Any

import psutil
import pynvml
from msgspec import Struct, field

from expertflow.hardware.nvml_gpm import METRICS, Gpm, is_supported

# What a driver answers when asking again cannot help.
FOR_GOOD = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
}
# Each call watches the bus for 20 ms and returns after them (NVML's documentation); there are two,
# one each way, so they are made rarely. Cards with GPM count by themselves and need none.
PCIE_EVERY_S, KB = 5.0, 1000
REASONS = {
    0x1: "gpu_idle",
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
VIOLATIONS = {
    "power": pynvml.NVML_PERF_POLICY_POWER,
    "thermal": pynvml.NVML_PERF_POLICY_THERMAL,
    "sync_boost": pynvml.NVML_PERF_POLICY_SYNC_BOOST,
    "board_limit": pynvml.NVML_PERF_POLICY_BOARD_LIMIT,
    "reliability": pynvml.NVML_PERF_POLICY_RELIABILITY,
}
LIMITS = {
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "max_operating": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}


class Device(Struct):
    """One card. ``unavailable`` holds what it never tells, ``lost`` what it failed to tell."""

    index: int
    handle: Any
    unavailable: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)
    _gpm: Gpm | None = None
    _pcie_asked_at: float | None = None

    def ask(self, what: str, question: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the driver; give null and note the reason where it has no answer."""
        if what in self.unavailable:
            return None
        try:
            answer = question(self.handle, *arguments)
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            # Of an older driver than pynvml asks for, the latter comes without a code.
            code = getattr(error, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            # A figure that came once is supported, whatever the driver says now.
            final = code in FOR_GOOD and what not in self._answered
            (self.unavailable if final else self.lost)[what] = f"NVML: {error}"
            return None
        if answer is not None:
            self._answered.add(what)
        return answer

    def take_lost(self) -> dict[str, str]:
        """Give what was lost since the last call."""
        lost, self.lost = self.lost, {}
        return lost

    def name(self) -> str | None:
        """Give the name the driver reports."""
        value = self.ask("gpu_name", pynvml.nvmlDeviceGetName)
        return None if value is None else str(value)

    def is_split(self) -> bool:
        """Tell whether the card is in MIG mode; one that does not know of it is not."""
        modes = self.ask("mig_mode", pynvml.nvmlDeviceGetMigMode)
        self.lost.pop("mig_mode", None)
        return modes is not None and modes[0] == pynvml.NVML_DEVICE_MIG_ENABLE

    def memory_total_bytes(self) -> int | None:
        """Give the card's memory."""
        info = self.ask("memory_total_bytes", pynvml.nvmlDeviceGetMemoryInfo)
        return None if info is None else int(info.total)

    def memory_free_bytes(self) -> int | None:
        """Give the memory that nobody holds."""
        info = self.ask("memory_free_bytes", pynvml.nvmlDeviceGetMemoryInfo)
        return None if info is None else int(info.free)

    def memory_used_bytes(self) -> int | None:
        """Give the memory in use by all processes and the driver."""
        info = self.ask("memory_used_bytes", pynvml.nvmlDeviceGetMemoryInfo)
        return None if info is None else int(info.used)

    def compute_capability(self) -> tuple[int, int] | None:
        """Give the compute capability, e.g. (9, 0)."""
        pair = self.ask("compute_capability", pynvml.nvmlDeviceGetCudaComputeCapability)
        return None if pair is None else (int(pair[0]), int(pair[1]))

    def utilization_percent(self) -> float | None:
        """Give the share of the last 1/6 to 1 s in which any kernel was running."""
        rates = self.ask("any_kernel_percent", pynvml.nvmlDeviceGetUtilizationRates)
        return None if rates is None else float(rates.gpu)

    def temperature_c(self) -> float | None:
        """Give the GPU's temperature."""
        sensor = pynvml.NVML_TEMPERATURE_GPU
        value = self.ask("temperature_c", pynvml.nvmlDeviceGetTemperature, sensor)
        return None if value is None else float(value)

    def temperature_limits_c(self) -> dict[str, float] | None:
        """Give where this card slows down, shuts down, and should stay below."""
        limits = {}
        for name, number in LIMITS.items():
            what = f"temperature_limits_c.{name}"
            value = self.ask(what, pynvml.nvmlDeviceGetTemperatureThreshold, number)
            # 0 is no limit of any card.
            if value:
                limits[name] = float(value)
            elif what in self.unavailable:
                self.unavailable.setdefault("temperature_limits_c", self.unavailable[what])
        if limits:
            self.unavailable.pop("temperature_limits_c", None)
        return limits or None

    def power_w(self) -> float | None:
        """Give the power drawn: the mean of the last second on most cards since Ampere."""
        value = self.ask("power_w", pynvml.nvmlDeviceGetPowerUsage)
        return None if value is None else value / 1000

    def power_limit_w(self) -> float | None:
        """Give the power limit in force."""
        value = self.ask("power_limit_w", pynvml.nvmlDeviceGetEnforcedPowerLimit)
        return None if value is None else value / 1000

    def energy_j(self) -> float | None:
        """Give the energy counter, which starts with the driver: use differences."""
        value = self.ask("energy_j", pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if value is None else value / 1000

    def clock_mhz(self, which: str) -> int | None:
        """Give the ``sm`` or ``memory`` clock."""
        kind = pynvml.NVML_CLOCK_SM if which == "sm" else pynvml.NVML_CLOCK_MEM
        value = self.ask(f"{which}_clock_mhz", pynvml.nvmlDeviceGetClockInfo, kind)
        return None if value is None else int(value)

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """Name what sets the clocks just now, idleness and settings included."""
        mask = self.ask("throttle_reasons", _clock_reasons)
        if mask is None:
            return None
        return tuple(name for bit, name in REASONS.items() if mask & bit)

    def violation_s(self) -> dict[str, float] | None:
        """Give the counters of time below the clocks that were asked for, by cause."""
        counters = {}
        for name, policy in VIOLATIONS.items():
            seen = self.ask(f"violation_s.{name}", pynvml.nvmlDeviceGetViolationStatus, policy)
            if seen is not None:
                counters[name] = seen.violationTime / 1e9
        return counters or None

    def counters(self) -> dict[str, float]:
        """Give tensor-active, SM-active and PCIe traffic since the last call, as far as known."""
        if self._gpm is None and "gpm" not in self.unavailable:
            self._gpm = self.ask("gpm", _open_gpm)
            if reason := self.unavailable.get("gpm"):
                reason = f"no GPM counters (Hopper and newer have them): {reason}"
                self.unavailable |= dict.fromkeys(list(METRICS)[:2], reason)
        if self._gpm is None or "gpm.reading" in self.unavailable:
            return self._pcie()
        figures = self._gpm_figures(self._gpm)
        return self._pcie() if "gpm.reading" in self.unavailable else figures

    def processes(self) -> list[dict[str, Any]]:
        """List who holds memory on the card, most first."""
        held: dict[int, dict[str, Any]] = {}
        questions = {
            "compute": pynvml.nvmlDeviceGetComputeRunningProcesses,
            "graphics": pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        }
        for kind, question in questions.items():
            for process in self.ask(f"processes.{kind}", question) or []:
                known = held.get(process.pid)
                sizes = (process.usedGpuMemory, known["memory_used_bytes"] if known else None)
                held[process.pid] = {
                    "pid": process.pid,
                    "name": _process_name(process.pid),
                    "kind": kind if known is None else "compute and graphics",
                    "memory_used_bytes": max((n for n in sizes if n is not None), default=None),
                    "gpu": self.index,
                }
        return sorted(held.values(), key=lambda p: -(p["memory_used_bytes"] or 0))

    def close(self) -> None:
        """Give back what was taken from the driver."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _gpm_figures(self, gpm: Gpm) -> dict[str, float]:
        """Ask the counters and note what they refuse: all of them, or some."""
        figures = dict(self.ask("gpm.reading", lambda _: gpm.read()) or {})
        if reason := self.lost.pop("gpm.reading", None):
            self.lost |= dict.fromkeys(METRICS, reason)
        elif reason := self.unavailable.get("gpm.reading"):
            # The bus can still be asked directly.
            self.unavailable |= dict.fromkeys(list(METRICS)[:2], reason)
        self._answered.update(figures)
        for name, code in gpm.refused.items():
            final = code in FOR_GOOD and name not in self._answered
            (self.unavailable if final else self.lost)[name] = f"NVML: {pynvml.NVMLError(code)}"
        return figures

    def _pcie(self) -> dict[str, float]:
        now = time.monotonic()
        if self._pcie_asked_at is not None and now - self._pcie_asked_at < PCIE_EVERY_S:
            return {}
        self._pcie_asked_at = now
        directions = {
            "pcie_rx_bytes_per_s": pynvml.NVML_PCIE_UTIL_RX_BYTES,
            "pcie_tx_bytes_per_s": pynvml.NVML_PCIE_UTIL_TX_BYTES,
        }
        asked = {
            name: self.ask(name, pynvml.nvmlDeviceGetPcieThroughput, way)
            for name, way in directions.items()
        }
        return {name: value * KB for name, value in asked.items() if value is not None}


def _clock_reasons(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        # Its name before driver 535.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _open_gpm(handle: Any) -> Gpm:
    if not is_supported(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return Gpm(handle)


def _process_name(pid: int) -> str | None:
    """Name a process; null for one that is gone or belongs to another container."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None
