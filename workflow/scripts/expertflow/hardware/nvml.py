"""NVIDIA cards through NVML: those that a job sees, following CUDA_VISIBLE_DEVICES.

A figure that a driver does not support is null with its reason and not queried again. One that
fails temporarily (a timeout, a card in reset) is null in that reading only, and counted.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pynvml
from msgspec import Struct, field

from expertflow.core.records import Record
from expertflow.hardware.records import CardProcess

NO_DRIVER = "no NVIDIA driver on this machine"
SIMULATED = "SIMULATED"
HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
MIG = "the card is in MIG mode, and none of its instances is visible here"
UNORDERED = (
    "cards of several kinds: CUDA numbers them by speed and the driver by the bus, so the card"
    " monitored may not be the one in use; set CUDA_DEVICE_ORDER=PCI_BUS_ID or use a UUID"
)
# A driver's errors that a retry cannot fix.
FOR_GOOD = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
}
# Each call measures the bus for 20 ms before it returns (NVML's documentation); there are two, one
# each way, so they are made rarely. Cards with GPM have their own counters and need none.
PCIE_EVERY_S, KB = 5.0, 1000
PCIE = {
    "pcie_rx_bytes_per_s": pynvml.NVML_PCIE_UTIL_RX_BYTES,
    "pcie_tx_bytes_per_s": pynvml.NVML_PCIE_UTIL_TX_BYTES,
}
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
LIMITS = {
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "max_operating": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}
PROCESSES = {
    "compute": pynvml.nvmlDeviceGetComputeRunningProcesses,
    "graphics": pynvml.nvmlDeviceGetGraphicsRunningProcesses,
}

# The card's own counters of multiprocessor activity (GPM): Hopper and newer, no daemon. The driver
# refreshes them every 100 ms; two readings closer together show nothing.
LEAST_GAP_S, MIB = 0.1, 2**20
# Figure: the metric, and its unit in ours.
METRICS = {
    "tensor_active_percent": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 1),
    "sm_active_percent": (pynvml.NVML_GPM_METRIC_SM_UTIL, 1),
    "pcie_rx_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, MIB),
    "pcie_tx_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, MIB),
}
# Those that only GPM has.
SM_METRICS = [name for name in METRICS if name not in PCIE]


def _throttle_reasons(handle: Any) -> tuple[str, ...]:
    mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return tuple(name for bit, name in REASONS.items() if mask & bit)


def _temperature_limits(handle: Any) -> dict[str, float] | None:
    found = {}
    for name, number in LIMITS.items():
        # Few cards have all of them; 0 means no limit.
        with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            found[name] = float(pynvml.nvmlDeviceGetTemperatureThreshold(handle, number))
    return {name: limit for name, limit in found.items() if limit} or None


# Figure: the driver query for a card.
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "gpu_name": lambda card: str(pynvml.nvmlDeviceGetName(card)),
    "uuid": lambda card: str(pynvml.nvmlDeviceGetUUID(card)),
    "memory_total_bytes": lambda card: int(pynvml.nvmlDeviceGetMemoryInfo(card).total),
    # Used by nobody.
    "memory_free_bytes": lambda card: int(pynvml.nvmlDeviceGetMemoryInfo(card).free),
    # By all processes and the driver.
    "memory_used_bytes": lambda card: int(pynvml.nvmlDeviceGetMemoryInfo(card).used),
    "compute_capability": lambda card: "{}.{}".format(
        *pynvml.nvmlDeviceGetCudaComputeCapability(card)
    ),
    # The share of the last 1/6 to 1 s in which any kernel was running.
    "any_kernel_percent": lambda card: float(pynvml.nvmlDeviceGetUtilizationRates(card).gpu),
    "temperature_c": lambda card: float(
        pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)
    ),
    # The mean of the last second on most cards since Ampere.
    "power_w": lambda card: pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
    # The limit in effect.
    "power_limit_w": lambda card: pynvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000,
    # A counter that starts with the driver: use differences.
    "energy_j": lambda card: pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000,
    "sm_clock_mhz": lambda card: int(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)),
    "memory_clock_mhz": lambda card: int(
        pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM)
    ),
    # What currently limits the clocks, including idleness and settings.
    "throttle_reasons": _throttle_reasons,
    "temperature_limits_c": _temperature_limits,
}


class Gpm:
    """Counters of one card between two readings; ``refuse`` gets a figure that fails alone."""

    def __init__(self, handle: Any, refuse: Callable[[str, Exception], None]) -> None:
        # An older driver has no such counters, and raises.
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._handle, self._refuse = handle, refuse
        self._earlier, self._later = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._read_at: float | None = None

    def read(self) -> dict[str, float] | None:
        """Return the figures since the last reading; null without one; NVMLError resets it."""
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < LEAST_GAP_S:
            return None
        # Set again below only on success: an error leaves nothing to compare with.
        started, self._read_at = self._read_at is not None, None
        pynvml.nvmlGpmSampleGet(self._handle, self._later)
        figures = self._between() if started else None
        # The two samples are swapped, because each is the driver's own memory.
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
                self._refuse(name, pynvml.NVMLError(answer.nvmlReturn))
            elif math.isfinite(answer.value):
                figures[name] = answer.value * unit
        return figures


class Device(Struct):
    """One card. ``unavailable`` has figures it never reports, ``lost`` those that failed once."""

    index: int
    handle: Any
    unavailable: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)
    _gpm: Gpm | None = None
    _pcie_asked_at: float | None = None

    def read_figure(self, name: str) -> Any:
        return self.ask_driver(name, QUESTIONS[name])

    def read_figures(self, *names: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return figures, and the reason of each that is null."""
        known = {name: self.read_figure(name) for name in names}
        reasons = {**self.lost, **self.unavailable}
        nulls = (name for name, value in known.items() if value is None)
        return known, {name: reasons.get(name, "the driver reported none") for name in nulls}

    def ask_driver(self, what: str, question: Callable[..., Any], *arguments: Any) -> Any:
        if what in self.unavailable:
            return None
        try:
            answer = question(self.handle, *arguments)
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            self._note(what, error)
            return None
        if answer is not None:
            self._answered.add(what)
        return answer

    def _note(self, what: str, error: Exception) -> None:
        # With a driver older than pynvml expects, an error has no code.
        code = getattr(error, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        # A figure that was read once is supported, whatever the driver says now.
        final = code in FOR_GOOD and what not in self._answered
        (self.unavailable if final else self.lost)[what] = f"NVML: {error}"

    def take_lost(self) -> dict[str, str]:
        lost, self.lost = self.lost, {}
        return lost

    def is_split(self) -> bool:
        with suppress(pynvml.NVMLError):
            current, _ = pynvml.nvmlDeviceGetMigMode(self.handle)
            return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)
        return False

    def list_instances(self) -> list["Device"]:
        """Return the instances of a card in MIG mode; each has its own name and memory."""
        found = []
        for i in range(self.ask_driver("instances", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            # Only some of the possible ones exist, or belong to this container.
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, i)
                found.append(Device(index=self.index, handle=handle))
        return found

    def read_counters(self) -> dict[str, float]:
        """Return tensor-active, SM-active and PCIe traffic since the last call, as far as known."""
        figures = self.ask_driver("gpm", self._read_gpm)
        if reason := self.lost.pop("gpm", None):
            self.lost |= dict.fromkeys(METRICS, reason)
        if reason := self.unavailable.get("gpm"):
            why = f"no GPM counters (Hopper and newer have them): {reason}"
            self.unavailable |= dict.fromkeys(SM_METRICS, why)
            # The bus can still be queried directly.
            return self._pcie()
        return figures or {}

    def _read_gpm(self, handle: Any) -> dict[str, float] | None:
        if self._gpm is None:
            self._gpm = Gpm(handle, self._note)
        return self._gpm.read()

    def list_processes(self) -> list[CardProcess]:
        held: dict[int, CardProcess] = {}
        for kind, question in PROCESSES.items():
            for process in self.ask_driver(f"processes.{kind}", question) or []:
                new = CardProcess(
                    pid=process.pid, name=None, memory_used_bytes=None, gpu=self.index
                )
                entry = held.setdefault(process.pid, new)
                with suppress(psutil.Error):
                    entry["name"] = psutil.Process(process.pid).name()
                sizes = (process.usedGpuMemory, entry["memory_used_bytes"])
                entry["memory_used_bytes"] = max((n for n in sizes if n is not None), default=None)
        return sorted(held.values(), key=lambda p: -(p["memory_used_bytes"] or 0))

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _pcie(self) -> dict[str, float]:
        now = time.monotonic()
        if self._pcie_asked_at is not None and now - self._pcie_asked_at < PCIE_EVERY_S:
            return {}
        self._pcie_asked_at = now
        asked = {
            name: self.ask_driver(name, pynvml.nvmlDeviceGetPcieThroughput, way)
            for name, way in PCIE.items()
        }
        return {name: value * KB for name, value in asked.items() if value is not None}


class Gpus(Record, frozen=True, kw_only=True):
    devices: tuple[Device, ...] = ()
    driver: str | None = None
    reason: str | None = None
    simulated: bool = False
    remarks: tuple[str, ...] = ()


@contextmanager
def open_gpus(n_gpus: int | None = None) -> Iterator[Gpus]:
    """Open the (first) cards visible through CUDA_VISIBLE_DEVICES for a block."""
    reason = None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        reason = NO_DRIVER if error.value in absent else f"NVML: {error}"
    if reason is not None:
        yield Gpus(reason=reason)
        return
    gpus = Gpus()
    try:
        gpus = _find(n_gpus)
        yield gpus
    finally:
        with suppress(pynvml.NVMLError):
            for device in gpus.devices:
                device.close()
            pynvml.nvmlShutdown()


def _find(n_gpus: int | None) -> Gpus:
    try:
        count, driver = pynvml.nvmlDeviceGetCount(), str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Gpus(reason=f"NVML: {error}")
    devices, why_none = list[Device](), "the NVIDIA driver finds no GPU"
    for i in range(count):
        # The driver also counts cards that a batch system hides from this job, which CUDA and
        # nvidia-smi skip.
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            devices.append(Device(index=len(devices), handle=handle))
        except pynvml.NVMLError as error:
            why_none = f"NVML: {error}"
    if not devices:
        return Gpus(driver=driver, reason=why_none)
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is not None and setting.startswith("MIG-"):
        devices = [one for card in devices if card.is_split() for one in card.list_instances()]
        # CUDA uses the first instance only.
        n_gpus = 1
    indexes, reason = visible_gpus(setting, [device.read_figure("uuid") for device in devices])
    by_uuid = setting is not None and setting.strip().startswith("GPU-")
    is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or by_uuid
    is_mixed = len({device.read_figure("gpu_name") for device in devices}) > 1
    chosen = tuple(devices[i] for i in indexes)[:n_gpus]
    if any(device.is_split() for device in chosen):
        chosen = tuple(chosen[0].list_instances()[:1]) if chosen[0].is_split() else ()
        reason = None if chosen else MIG
    remarks = (UNORDERED,) if is_mixed and not is_ordered else ()
    names = [device.read_figure("gpu_name") or "" for device in chosen]
    simulated = any(text.startswith(SIMULATED) for text in (driver, *names))
    return Gpus(devices=chosen, driver=driver, reason=reason, simulated=simulated, remarks=remarks)


def visible_gpus(
    setting: str | None, uuids: Sequence[str | None]
) -> tuple[tuple[int, ...], str | None]:
    """Return the indexes of the cards that ``setting`` shows a job, or the reason for none.

    A list ends at the first entry without a card.

    >>> visible_gpus("1,0", ["GPU-a", "GPU-b"])
    ((1, 0), None)
    """
    if setting is None:
        return tuple(range(len(uuids))), None
    found: list[int] = []
    for entry in setting.split(","):
        index = gpu_index(entry.strip(), uuids)
        if index is None:
            break
        found.append(index)
    return tuple(found), None if found else MIG if "MIG-" in setting else HIDDEN


def gpu_index(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Return the index of the card that an index or (the start of) a UUID names; null if none."""
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
