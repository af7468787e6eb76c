"""The only door to NVML. A figure that the driver does not support is null, with its reason."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

NO_DRIVER = "no NVIDIA driver on this machine"


@dataclass(slots=True)
class Device:
    """One GPU, asked through NVML. ``unavailable`` collects what it does not tell, and why."""

    index: int = 0
    handle: Any = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def ask(self, what: str, question: Callable[[], Any]) -> Any:
        """Ask the driver; give null and note the reason where it has no answer."""
        if what in self.unavailable:
            return None
        try:
            return question()
        except pynvml.NVMLError as error:
            self.unavailable[what] = str(error)
            return None

    def name(self) -> str | None:
        """Give the name the driver reports."""
        value = self.ask("gpu_name", lambda: pynvml.nvmlDeviceGetName(self.handle))
        return None if value is None else str(value)

    def driver(self) -> str | None:
        """Give the driver's version."""
        value = self.ask("driver", pynvml.nvmlSystemGetDriverVersion)
        return None if value is None else str(value)

    def memory_total_bytes(self) -> int | None:
        """Give the card's memory."""
        info = self.ask("memory_total_bytes", lambda: pynvml.nvmlDeviceGetMemoryInfo(self.handle))
        return None if info is None else int(info.total)

    def memory_used_bytes(self) -> int | None:
        """Give the memory in use by all processes."""
        info = self.ask("memory_used_bytes", lambda: pynvml.nvmlDeviceGetMemoryInfo(self.handle))
        return None if info is None else int(info.used)

    def compute_capability(self) -> str | None:
        """Give the compute capability, e.g. 9.0."""
        pair = self.ask(
            "compute_capability", lambda: pynvml.nvmlDeviceGetCudaComputeCapability(self.handle)
        )
        return None if pair is None else f"{pair[0]}.{pair[1]}"

    def utilization_percent(self) -> float | None:
        """Give the share of the last sampling period in which any kernel was running."""
        rates = self.ask(
            "any_kernel_percent", lambda: pynvml.nvmlDeviceGetUtilizationRates(self.handle)
        )
        return None if rates is None else float(rates.gpu)

    def temperature_c(self) -> float | None:
        """Give the GPU's temperature."""
        sensor = pynvml.NVML_TEMPERATURE_GPU
        value = self.ask(
            "temperature_c", lambda: pynvml.nvmlDeviceGetTemperature(self.handle, sensor)
        )
        return None if value is None else float(value)

    def power_w(self) -> float | None:
        """Give the power drawn now."""
        value = self.ask("power_w", lambda: pynvml.nvmlDeviceGetPowerUsage(self.handle))
        return None if value is None else value / 1000

    def power_limit_w(self) -> float | None:
        """Give the enforced power limit."""
        value = self.ask(
            "power_limit_w", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(self.handle)
        )
        return None if value is None else value / 1000

    def energy_j(self) -> float | None:
        """Give the energy counter, which starts with the driver: use differences."""
        value = self.ask(
            "energy_j", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)
        )
        return None if value is None else value / 1000

    def processes(self) -> list[dict[str, Any]]:
        """List who holds memory on the card."""
        found = self.ask(
            "processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        )
        return [{"pid": p.pid, "memory_used_bytes": p.usedGpuMemory} for p in found or []]


def open_device(index: int = 0) -> Device | None:
    """Open a GPU; null where there is no driver or no such card."""
    try:
        pynvml.nvmlInit()
        if index >= pynvml.nvmlDeviceGetCount():
            return None
        return Device(index=index, handle=pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return None
