"""Show in a terminal what a machine is."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expertflow.core.format import GB, gb
from expertflow.hardware.records import GpuSeen, MachineFacts, ScratchFacts


def print_machine(machine: MachineFacts, console: Console) -> None:
    """Print processors, memory, cards and disks; what is unknown is called so."""
    if machine.simulated:
        console.print("SIMULATED: these figures come from no real card")
    for words, value in _facts(machine):
        console.print(f"{words:<10}{escape(value)}", highlight=False)
    for text in machine.remarks:
        console.print(escape(text), highlight=False)
    if machine.scratch:
        console.print(_disks(machine.scratch))


def _facts(machine: MachineFacts) -> Iterator[tuple[str, str]]:
    quota = machine.cpu_quota_cpus
    cores = machine.n_cpus_physical
    yield (
        "CPU",
        f"{machine.cpu_model or 'unknown'}: {'unknown' if cores is None else cores} cores,"
        f" {machine.n_cpus_logical} threads, {machine.n_cpus_usable} usable (affinity"
        f" {machine.n_cpus_affinity}, quota {'none' if quota is None else f'{quota:g}'})",
    )
    limit = machine.ram_limit_bytes
    yield (
        "RAM",
        f"{gb(machine.ram_total_bytes)}, {gb(machine.ram_usable_bytes)} usable"
        f" (limit {'none' if limit is None else gb(limit)})",
    )
    if not machine.gpus:
        yield "GPU", f"none ({machine.unavailable['gpus']})"
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}", _card(gpu)
    if machine.driver is not None:
        yield "driver", machine.driver


def _card(gpu: GpuSeen) -> str:
    known = [gpu.name or "name unknown"]
    if gpu.memory_total_bytes is not None:
        known.append(gb(gpu.memory_total_bytes))
    if gpu.memory_free_bytes is not None:
        known.append(f"{gb(gpu.memory_free_bytes)} free")
    if gpu.compute_capability is not None:
        known.append(f"compute capability {gpu.compute_capability}")
    for name, able in (("bf16", gpu.supports_bf16), ("TF32", gpu.supports_tf32)):
        if able is not None:
            known.append(name if able else f"no {name}")
    if gpu.power_limit_w is not None:
        known.append(f"limit {gpu.power_limit_w:.0f} W")
    known.append(f"listed as {gpu.listed_as}" if gpu.listed_as else "not listed: peaks unknown")
    return ", ".join(known)


def _disks(places: tuple[ScratchFacts, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("place", "because of", "kind", "free GB", "read MB/s", "how"):
        right = name in ("free GB", "read MB/s")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for place in places:
        speed = place.read_bytes_per_s
        table.add_row(
            escape(place.path),
            escape(place.asked_by),
            _kind(place),
            f"{place.free_bytes / GB:,.1f}",
            "memory" if place.is_memory else "unknown" if speed is None else f"{speed / 1e6:,.0f}",
            escape(place.read_method),
        )
    return table


def _kind(place: ScratchFacts) -> str:
    # A virtual disk is often said to spin, whatever is behind it.
    spins = {True: ", said to spin", False: ", solid state", None: ""}[place.is_rotational]
    return f"{place.file_system or 'unknown'}{spins}"
