"""Find out what this machine is: processors, memory, cards, places for a copy."""

import logging
import math
import os
from pathlib import Path
from typing import Any

import psutil

from expertflow.core.errors import HardwareError
from expertflow.core.format import gb
from expertflow.hardware import gpu_table
from expertflow.hardware.cgroup import cpu_quota, memory_left_bytes, memory_limit_bytes
from expertflow.hardware.disk import candidates, scratch_facts
from expertflow.hardware.disk import file_read_speed as file_read_speed
from expertflow.hardware.gpu_table import gpu_by_name as gpu_by_name
from expertflow.hardware.nvml import open_gpus
from expertflow.hardware.nvml_device import Device
from expertflow.hardware.records import GpuFacts, GpuSeen, MachineFacts

log = logging.getLogger(__name__)
# Tensor cores have bf16 and TF32 from this compute capability on (CUDA documentation).
AMPERE = (8, 0)


def usable_cpus(root: Path = Path("/")) -> int:
    """Count the processors that this process may use: by affinity, and by its cgroup's quota."""
    n = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return n if quota is None else max(1, min(n, math.floor(quota)))


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Give the memory that is free, of the machine's and of what the cgroup leaves."""
    free, left = psutil.virtual_memory().available, memory_left_bytes(root)
    return free if left is None else min(free, left)


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
    with open_gpus() as gpus:
        name = gpus.devices[0].name() if gpus.devices else None
        if name is None:
            raise HardwareError(
                "hardware is 'auto' and this machine has no NVIDIA GPU"
                f" ({gpus.reason or 'its driver gives no name'}); plan for a card by name with"
                " --config hardware='H100 SXM', train on the CPU with hardware=cpu, or use"
                " preset=demo"
            )
        for text in gpus.remarks:
            log.warning("%s", text)
        return gpu_by_name(name, table) or _unlisted(name, gpus.devices[0])


def probe_machine(
    *, table: list[dict[str, Any]], scratch: str | None = None, measure_disks: bool = False
) -> MachineFacts:
    """Describe the machine as this process may use it."""
    unavailable: dict[str, str] = {}
    model, quota, limit = _cpu_model(), cpu_quota(), memory_limit_bytes()
    if model is None:
        unavailable["cpu_model"] = "the system does not name it"
    if quota is None:
        unavailable["cpu_quota_cpus"] = "no cgroup sets one"
    if limit is None:
        unavailable["ram_limit_bytes"] = "no cgroup sets one"
    n_physical, total = psutil.cpu_count(logical=False), psutil.virtual_memory().total
    if n_physical is None:
        unavailable["n_cpus_physical"] = "the system does not tell cores from threads"
    with open_gpus() as gpus:
        seen = tuple(_seen(device, table) for device in gpus.devices)
        if not seen:
            unavailable |= dict.fromkeys(("gpus", "driver"), gpus.reason or "no GPU")
    places = candidates(scratch, dict(os.environ))
    return MachineFacts(
        cpu_model=model,
        n_cpus_physical=n_physical,
        n_cpus_logical=psutil.cpu_count() or 1,
        n_cpus_affinity=len(os.sched_getaffinity(0)),
        cpu_quota_cpus=quota,
        n_cpus_usable=usable_cpus(),
        ram_total_bytes=total,
        ram_limit_bytes=limit,
        ram_usable_bytes=total if limit is None else min(total, limit),
        driver=gpus.driver,
        gpus=seen,
        scratch=scratch_facts(places, measure=measure_disks),
        simulated=gpus.simulated,
        unavailable=unavailable,
        remarks=gpus.remarks,
    )


def short_of_memory(needed_bytes: int, n_gpus: int) -> str | None:
    """Say which of the first ``n_gpus`` visible cards has too little memory free, and who holds it.

    Null where all have enough, or none can be asked.
    """
    with open_gpus() as gpus:
        for device in gpus.devices[:n_gpus]:
            free = device.memory_free_bytes()
            if free is not None and free < needed_bytes:
                return f"GPU {device.index} has {gb(free)} free; {_holders(device)}"
    return None


def free_gpu_memory_bytes(n_gpus: int) -> int | None:
    """Give the least memory that is free on the first ``n_gpus`` visible cards; null if unknown."""
    with open_gpus() as gpus:
        free = [device.memory_free_bytes() for device in gpus.devices[:n_gpus]]
    return min((n for n in free if n is not None), default=None)


def _holders(device: Device) -> str:
    held = [
        f"{p['name'] or 'a process'} (pid {p['pid']}, {gb(p['memory_used_bytes'])})"
        for p in device.processes()
        if p["memory_used_bytes"]
    ]
    return f"held by {', '.join(held)}" if held else "no process is seen to hold the rest"


def _seen(device: Device, table: list[dict[str, Any]]) -> GpuSeen:
    name, capability = device.name(), device.compute_capability()
    row = None if name is None else gpu_table.find_row(name, table)
    modern = None if capability is None else capability >= AMPERE
    facts: dict[str, Any] = {
        "name": name,
        "memory_total_bytes": device.memory_total_bytes(),
        "memory_free_bytes": device.memory_free_bytes(),
        "compute_capability": _text(capability),
        "supports_bf16": modern,
        "supports_tf32": modern,
        "power_limit_w": device.power_limit_w(),
        "temperature_limits_c": device.temperature_limits_c(),
    }
    told = {**device.lost, **device.unavailable}
    same = dict.fromkeys(("supports_bf16", "supports_tf32"), "compute_capability")
    same["name"] = "gpu_name"
    return GpuSeen(
        index=device.index,
        listed_as=None if row is None else row["name"],
        unavailable={
            key: told.get(same.get(key, key), "the driver gave none")
            for key, value in facts.items()
            if value is None
        },
        **facts,
    )


def _unlisted(name: str, device: Device) -> GpuFacts:
    return gpu_table.unlisted(
        name,
        memory_total_bytes=device.memory_total_bytes(),
        compute_capability=_text(device.compute_capability()),
        power_limit_w=device.power_limit_w(),
    )


def _text(capability: tuple[int, int] | None) -> str | None:
    return None if capability is None else f"{capability[0]}.{capability[1]}"


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)
