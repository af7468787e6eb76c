"""One NVIDIA card, asked through NVML.

A figure that a driver does not support is null with its reason and not asked for again. One that
fails for once (a timeout, a card in reset) is null in that reading only, and counted.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import psutil
import pynvml
from msgspec import Struct, field

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


# The card's own counters of what its multiprocessors did (GPM): Hopper and newer, no daemon. The
# driver refreshes them every 100 ms; two readings closer together tell nothing.
LEAST_GAP_S, MIB = 0.1, 2**20
# Figure: the metric, and what one of its units is in ours.
METRICS = {
    "tensor_active_percent": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 1),
    "sm_active_percent": (pynvml.NVML_GPM_METRIC_SM_UTIL, 1),
    "pcie_rx_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, MIB),
    "pcie_tx_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, MIB),
}


def _clock_reasons(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        # Its name before driver 535.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _thousandth(value: int) -> float:
    return value / 1000


# Figure: the question to the driver, its arguments, and how its answer is read.
QUESTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Callable[[Any], Any]]] = {
    "gpu_name": (pynvml.nvmlDeviceGetName, (), str),
    "uuid": (pynvml.nvmlDeviceGetUUID, (), str),
    "memory_total_bytes": (pynvml.nvmlDeviceGetMemoryInfo, (), lambda info: int(info.total)),
    # Nobody holds this memory.
    "memory_free_bytes": (pynvml.nvmlDeviceGetMemoryInfo, (), lambda info: int(info.free)),
    # By all processes and the driver.
    "memory_used_bytes": (pynvml.nvmlDeviceGetMemoryInfo, (), lambda info: int(info.used)),
    "compute_capability": (pynvml.nvmlDeviceGetCudaComputeCapability, (), tuple),
    # The share of the last 1/6 to 1 s in which any kernel was running.
    "any_kernel_percent": (pynvml.nvmlDeviceGetUtilizationRates, (), lambda r: float(r.gpu)),
    "temperature_c": (pynvml.nvmlDeviceGetTemperature, (pynvml.NVML_TEMPERATURE_GPU,), float),
    # The mean of the last second on most cards since Ampere.
    "power_w": (pynvml.nvmlDeviceGetPowerUsage, (), _thousandth),
    # The limit in force.
    "power_limit_w": (pynvml.nvmlDeviceGetEnforcedPowerLimit, (), _thousandth),
    # A counter that starts with the driver: use differences.
    "energy_j": (pynvml.nvmlDeviceGetTotalEnergyConsumption, (), _thousandth),
    "sm_clock_mhz": (pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_SM,), int),
    "memory_clock_mhz": (pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_MEM,), int),
    # What sets the clocks just now, idleness and settings included.
    "throttle_reasons": (
        _clock_reasons,
        (),
        lambda mask: tuple(name for bit, name in REASONS.items() if mask & bit),
    ),
}


class Gpm:
    """Counters of one card between two readings; ``refused`` has the last one's error codes."""

    def __init__(self, handle: Any) -> None:
        # An older driver has no such counters, and raises.
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._handle = handle
        self._earlier, self._later = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._read_at: float | None = None
        self.refused: dict[str, int] = {}

    def read(self) -> dict[str, float] | None:
        """Return the figures since the reading before; null at the first, or too soon after it.

        Raises:
            NVMLError: the driver gave no reading; the next one starts afresh.
        """
        self.refused = {}
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < LEAST_GAP_S:
            return None
        started, self._read_at = self._read_at is not None, None
        pynvml.nvmlGpmSampleGet(self._handle, self._later)
        figures = self._between() if started else None
        self._earlier, self._later, self._read_at = self._later, self._earlier, now
        return figures

    def close(self) -> None:
        for sample in (self._earlier, self._later):
            pynvml.nvmlGpmSampleFree(sample)

    def _between(self) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        request.sample1, request.sample2 = self._earlier, self._later
        for i, (metric, _) in enumerate(METRICS.values()):
            request.metrics[i].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        figures = {}
        for i, (name, (_, unit)) in enumerate(METRICS.items()):
            answer = request.metrics[i]
            if answer.nvmlReturn != pynvml.NVML_SUCCESS:
                self.refused[name] = answer.nvmlReturn
            elif math.isfinite(answer.value):
                figures[name] = answer.value * unit
        return figures


class Device(Struct):
    """One card. ``unavailable`` holds what it never tells, ``lost`` what it failed to tell."""

    index: int
    handle: Any
    unavailable: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)
    _gpm: Gpm | None = None
    _pcie_asked_at: float | None = None

    def figure(self, name: str) -> Any:
        question, arguments, read = QUESTIONS[name]
        answer = self.ask(name, question, *arguments)
        return None if answer is None else read(answer)

    def reason(self, name: str) -> str:
        return self.unavailable.get(name) or self.lost.get(name) or "the driver gave none"

    def ask(self, what: str, question: Callable[..., Any], *arguments: Any) -> Any:
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
        lost, self.lost = self.lost, {}
        return lost

    def is_split(self) -> bool:
        modes = self.ask("mig_mode", pynvml.nvmlDeviceGetMigMode)
        self.lost.pop("mig_mode", None)
        return modes is not None and modes[0] == pynvml.NVML_DEVICE_MIG_ENABLE

    def temperature_limits_c(self) -> dict[str, float] | None:
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

    def violation_s(self) -> dict[str, float] | None:
        counters = {}
        for name, policy in VIOLATIONS.items():
            seen = self.ask(f"violation_s.{name}", pynvml.nvmlDeviceGetViolationStatus, policy)
            if seen is not None:
                counters[name] = seen.violationTime / 1e9
        return counters or None

    def counters(self) -> dict[str, float]:
        """Return tensor-active, SM-active and PCIe traffic since the last call, as far as known."""
        if self._gpm is None and "gpm" not in self.unavailable:
            self._gpm = self.ask("gpm", Gpm)
            if reason := self.unavailable.get("gpm"):
                reason = f"no GPM counters (Hopper and newer have them): {reason}"
                self.unavailable |= dict.fromkeys(list(METRICS)[:2], reason)
        if self._gpm is None or "gpm.reading" in self.unavailable:
            return self._pcie()
        figures = self._gpm_figures(self._gpm)
        return self._pcie() if "gpm.reading" in self.unavailable else figures

    def processes(self) -> list[dict[str, Any]]:
        held: dict[int, dict[str, Any]] = {}
        questions = {
            "compute": pynvml.nvmlDeviceGetComputeRunningProcesses,
            "graphics": pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        }
        for kind, question in questions.items():
            for process in self.ask(f"processes.{kind}", question) or []:
                known = held.get(process.pid)
                sizes = (process.usedGpuMemory, known["memory_used_bytes"] if known else None)
                try:
                    name = psutil.Process(process.pid).name()
                except psutil.Error:
                    name = None
                held[process.pid] = {
                    "pid": process.pid,
                    "name": name,
                    "kind": kind if known is None else "compute and graphics",
                    "memory_used_bytes": max((n for n in sizes if n is not None), default=None),
                    "gpu": self.index,
                }
        return sorted(held.values(), key=lambda p: -(p["memory_used_bytes"] or 0))

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _gpm_figures(self, gpm: Gpm) -> dict[str, float]:
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
