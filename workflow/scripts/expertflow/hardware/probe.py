"""Find out what this machine is, and look cards up by their exact name."""

import os
from typing import Any

from expertflow.core.errors import HardwareError
from expertflow.hardware.nvml import open_device
from expertflow.hardware.records import GpuFacts

GB, TERA = 10**9, 10**12


def usable_cpus() -> int:
    """Count the processors that this process may use, by affinity."""
    return len(os.sched_getaffinity(0))


def gpu_by_name(name: str, table: list[dict[str, Any]]) -> GpuFacts | None:
    """Look a card up by its short name or by the driver's; no guessing, null when unknown."""
    for row in table:
        if name == row["name"] or name in row.get("driver_names", []):
            return _facts(row)
    return None


def resolve_gpu(hardware: str, table: list[dict[str, Any]]) -> GpuFacts | None:
    """Turn the ``hardware`` setting into a card; null means the CPU.

    Raises:
        HardwareError: the name is unknown, or ``auto`` finds no card on this machine.
    """
    if hardware == "cpu":
        return None
    if hardware != "auto":
        facts = gpu_by_name(hardware, table)
        if facts is None:
            known = ", ".join(row["name"] for row in table)
            raise HardwareError(
                f"hardware is {hardware!r}: no such row in config/hardware/gpus.yaml; use cpu, or"
                f" one of {known}"
            )
        return facts
    device = open_device()
    name = device.name() if device else None
    if device is None or name is None:
        raise HardwareError(
            "hardware is 'auto' and this machine has no NVIDIA GPU; plan for a card by name with"
            " --config hardware='H100 SXM', train on the CPU with hardware=cpu, or use preset=demo"
        )
    return gpu_by_name(name, table) or _unknown(name, device.memory_total_bytes())


def _facts(row: dict[str, Any]) -> GpuFacts:
    def scaled(key: str, factor: int) -> float | None:
        value = row.get(key)
        return None if value is None else float(value) * factor

    memory = scaled("memory_gb", GB)
    return GpuFacts(
        name=row["name"],
        memory_total_bytes=None if memory is None else int(memory),
        compute_capability=None,
        peak_bf16_flops_per_s=scaled("bf16_tflops", TERA),
        peak_fp16_flops_per_s=scaled("fp16_tflops", TERA),
        peak_tf32_flops_per_s=scaled("tf32_tflops", TERA),
        peak_bandwidth_bytes_per_s=scaled("bandwidth_gb_per_s", GB),
        power_limit_w=scaled("power_w", 1),
        source=row["source"],
        driver_names=tuple(row.get("driver_names", ())),
    )


def _unknown(name: str, memory_total_bytes: int | None) -> GpuFacts:
    return GpuFacts(
        name=name,
        memory_total_bytes=memory_total_bytes,
        compute_capability=None,
        peak_bf16_flops_per_s=None,
        peak_fp16_flops_per_s=None,
        peak_tf32_flops_per_s=None,
        peak_bandwidth_bytes_per_s=None,
        power_limit_w=None,
        source="not in config/hardware/gpus.yaml: peaks unknown",
    )
