"""Detect this machine, and what cgroups (version 1 or 2) or a batch job make available of it."""

import importlib.metadata
import logging
import math
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from expertflow.core.errors import HardwareError
from expertflow.core.format import gb
from expertflow.hardware.disk import describe_places, list_candidates
from expertflow.hardware.gpu_table import AMPERE, CardRow, describe_unlisted, find_row, gpu_by_name
from expertflow.hardware.nvml import HIDDEN, NO_DRIVER, Device, open_gpus
from expertflow.hardware.records import GpuFacts

log = logging.getLogger(__name__)
ROOT = Path("/")
WHY_NULL = {
    "cpu_model": "the system does not report it",
    "cpu_quota_cpus": "no cgroup sets one",
    "ram_limit_bytes": "no cgroup sets one",
    "n_cpus_physical": "the system does not distinguish cores from threads",
}
NO_CUDA = (
    "the plan is for {} but torch sees no CUDA device; run on that machine, or plan with"
    " hardware=cpu"
)
# Version 1 of cgroups writes "no limit" as a number near 2**63.
NO_LIMIT = 1 << 60


def usable_cpus(root: Path = ROOT) -> int:
    n = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return n if quota is None else max(1, min(n, math.floor(quota)))


def free_memory_bytes(root: Path = ROOT) -> int:
    free, (_, left) = psutil.virtual_memory().available, memory_limits(root)
    return free if left is None else min(free, left)


def resolve_gpu(hardware: str, table: Sequence[CardRow]) -> GpuFacts | None:
    """Resolve the ``hardware`` setting; null is the CPU. HardwareError if the name is unknown."""
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
        name = gpus.devices[0].read_figure("gpu_name") if gpus.devices else None
        if name is None:
            return None
        for text in gpus.remarks:
            log.warning("%s", text)
        names = ("memory_total_bytes", "compute_capability", "power_limit_w")
        figures, _ = gpus.devices[0].read_figures(*names)
        return gpu_by_name(name, table) or describe_unlisted(name, **figures)


def no_gpu_reason() -> str | None:
    """Return what ``auto`` resolves to if no GPU reports its name, else null."""
    with open_gpus() as gpus:
        if gpus.devices and gpus.devices[0].read_figure("gpu_name") is not None:
            return None
        reason = gpus.reason or "its driver reports no name"
    return f"hardware is 'auto' and this machine has no NVIDIA GPU ({reason})"


def lacks_cuda() -> bool:
    """Return whether torch certainly sees no card, without importing it."""
    with open_gpus() as gpus:
        hidden = gpus.reason in (NO_DRIVER, HIDDEN)
    return hidden or package_version("torch", "install envs/").endswith("+cpu")


def count_gpus() -> int | None:
    """Return how many cards a job sees here; null if the driver does not report it."""
    with open_gpus() as gpus:
        return len(gpus.devices) or None


def lacks_compiler() -> bool:
    """Return whether a C compiler or Python's headers, which triton needs, are missing here."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return True
    headers = sysconfig.get_path("include", "posix_prefix")
    command = [compiler, "-E", "-xc", f"-I{headers}", "-o", os.devnull, "-"]
    try:
        done = subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True)
    except OSError:
        return True
    return done.returncode != 0


def package_version(name: str, remedy: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise HardwareError(f"package {name} is not installed; {remedy}") from error


@cache
def cpu_flops_per_s(width: int = 64, n_products: int = 3000) -> float:
    """Return this CPU's speed on the fastest of many fp32 products: some escape other load.

    One core computes so small a product; on a busy machine, a larger one waits for all cores.
    """
    # Imported here, since only a forecast for a CPU needs it.
    import numpy as np

    factor = np.random.default_rng(0).random((width, width), dtype=np.float32)
    fastest_s = math.inf
    for _ in range(n_products):
        start_s = time.perf_counter()
        factor @ factor
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return usable_cores() * 2 * width**3 / fastest_s


def usable_cores() -> int:
    usable, physical = usable_cpus(), psutil.cpu_count(logical=False)
    return min(usable, physical or usable)


def probe_machine(*, table: Sequence[CardRow] = (), measure_disks: bool = False) -> dict[str, Any]:
    """Describe a machine as a job may use it, as JSON.

    ``*_usable`` are within affinity and the cgroup's limits. ``unavailable`` maps a null figure to
    its reason, and ``gpus`` to the reason for none.
    """
    lines = _read(Path("/proc/cpuinfo")).split("\n")
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    (limit, _), total = memory_limits(), psutil.virtual_memory().total
    machine: dict[str, Any] = {
        "cpu_model": next(named, None),
        "n_cpus_physical": psutil.cpu_count(logical=False),
        "n_cpus_logical": psutil.cpu_count() or 1,
        "n_cpus_affinity": len(os.sched_getaffinity(0)),
        "cpu_quota_cpus": cpu_quota(),
        "n_cpus_usable": usable_cpus(),
        "ram_total_bytes": total,
        "ram_limit_bytes": limit,
        "ram_usable_bytes": total if limit is None else min(total, limit),
    }
    unavailable = {name: why for name, why in WHY_NULL.items() if machine[name] is None}
    with open_gpus() as gpus:
        seen = [_describe_gpu(device, table) for device in gpus.devices]
        if not seen:
            unavailable |= dict.fromkeys(("gpus", "driver"), gpus.reason or "no GPU")
    return {
        **machine,
        "driver": gpus.driver,
        "gpus": seen,
        "scratch": describe_places(list_candidates(os.environ), measure=measure_disks),
        "simulated": gpus.simulated,
        "unavailable": unavailable,
        "remarks": list(gpus.remarks),
    }


def least_free_gpu_memory(n_gpus: int) -> tuple[int, str] | None:
    """Return the least free bytes on ``n_gpus`` cards and who uses the rest; null if unknown."""
    with open_gpus() as gpus:
        free = [(d.read_figure("memory_free_bytes"), d) for d in gpus.devices[:n_gpus]]
        known = [(n_bytes, device) for n_bytes, device in free if n_bytes is not None]
        if not known:
            return None
        n_bytes, device = min(known, key=lambda pair: pair[0])
        held = ", ".join(
            f"{p['name'] or 'a process'} (pid {p['pid']}, {gb(p['memory_used_bytes'])})"
            for p in device.list_processes()
            if p["memory_used_bytes"]
        )
        holders = f"used by {held}" if held else "no visible process uses the remainder"
        return n_bytes, f"GPU {device.index} has {gb(n_bytes)} free; {holders}"


def _describe_gpu(device: Device, table: Sequence[CardRow]) -> dict[str, Any]:
    """Describe a card; ``listed_as`` is its name in the table, null if its peaks are unknown."""
    names = ("memory_total_bytes", "memory_free_bytes", "compute_capability", "power_limit_w")
    known, unavailable = device.read_figures("gpu_name", *names)
    name, capability = known["gpu_name"], known["compute_capability"]
    row = None if name is None else find_row(name, table)
    if "gpu_name" in unavailable:
        unavailable["name"] = unavailable.pop("gpu_name")
    modern = None if capability is None else float(capability) >= AMPERE
    if modern is None:
        same = ("supports_bf16", "supports_tf32")
        unavailable |= dict.fromkeys(same, unavailable["compute_capability"])
    return {
        "index": device.index,
        "name": name,
        "listed_as": None if row is None else row["name"],
        "memory_total_bytes": known["memory_total_bytes"],
        "memory_free_bytes": known["memory_free_bytes"],
        "compute_capability": capability,
        "supports_bf16": modern,
        "supports_tf32": modern,
        "power_limit_w": known["power_limit_w"],
        "unavailable": unavailable,
    }


def cpu_quota(root: Path = ROOT) -> float | None:
    quotas = []
    for folder in _folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        # "max" or -1: no quota.
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limits(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the cgroup's limit, and what is left of it, idle cached files included."""
    found = list(_memory_limits(root))
    least = min((limit for limit, _ in found), default=None)
    return least, min((left for _, left in found if left is not None), default=None)


def _memory_limits(root: Path) -> Iterator[tuple[int, int | None]]:
    for folder in _folders(root, "memory"):
        for name, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _read(folder / name), _read(folder / used)
            if not most.isdigit() or int(most) >= NO_LIMIT:
                continue
            left = None
            if now.isdigit():
                lines = _read(folder / "memory.stat").split("\n")
                stat = dict(line.split(" ", 1) for line in lines if " " in line)
                # The kernel drops idle cached files before it runs out of memory.
                left = max(0, int(most) - int(now) + int(stat.get(cached, 0)))
            yield int(most), left


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's control groups and all above them: the tightest limit counts."""
    for line in _read(root / "proc/self/cgroup").split("\n"):
        # 4:cpu,cpuacct:/a/b of version 1, or 0::/a/b of version 2.
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        # Version 2 may be mounted next to version 1, as `unified`.
        places = (names, controller) if names else ("", "unified")
        for mount in (root / "sys/fs/cgroup" / place for place in places):
            folder = mount / path.strip("/")
            yield from (up for up in (folder, *folder.parents) if up.is_relative_to(mount))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
