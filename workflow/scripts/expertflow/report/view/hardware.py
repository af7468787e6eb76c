"""Put the monitor's figures into a few lines of text; what was not read is left to its reason."""

from typing import Any

from expertflow.report import format as f
from expertflow.report.diagnose import look_up

Report = dict[str, Any]


def rows(report: Report) -> list[tuple[str, str]]:
    hardware = report["training_report"]["hardware"]
    found = [
        ("Energy", _energy(report)),
        ("Power", _mean(hardware, "power_w", "W")),
        ("Hottest", _temperature(hardware)),
        ("Held back", _throttled(hardware["throttle_s"])),
        ("Clocks", _clocks(hardware)),
        ("PCIe", _two_rates(hardware, "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")),
        ("Disk", _disk(hardware)),
        ("Monitor itself", _monitor(hardware)),
    ]
    return [(name, text) for name, text in found if text]


def machine(report: Report) -> list[tuple[str, str]]:
    facts = report["training_report"]["hardware"]["machine"] or {}
    cores = [
        f"{facts[key]} {name}"
        for key, name in (("n_cpus_physical", "physical cores"), ("n_cpus_usable", "usable"))
        if facts.get(key) is not None
    ]
    found = [
        (
            "processor",
            ", ".join([*([facts["cpu_model"]] if facts.get("cpu_model") else []), *cores]),
        ),
        ("memory", _memory(facts)),
        ("scratch", "; ".join(_disk_place(place) for place in facts.get("scratch") or ())),
    ]
    return [(name, text) for name, text in found if text]


def _memory(facts: dict[str, Any]) -> str:
    total, usable = facts.get("ram_total_bytes"), facts.get("ram_usable_bytes")
    if total is None:
        return ""
    return f.size(total) + ("" if usable in (None, total) else f", {f.size(usable)} usable")


def _disk_place(place: dict[str, Any]) -> str:
    free, speed = place.get("free_bytes"), place.get("read_bytes_per_s")
    parts = ["memory" if place.get("is_memory") else place.get("file_system")]
    parts += [None if free is None else f"{f.size(free)} free"]
    parts += [None if speed is None else f"{f.size(speed)}/s read"]
    return f"{place.get('path')} ({', '.join(part for part in parts if part)})"


def _energy(report: Report) -> str:
    hardware = report["training_report"]["hardware"]
    if hardware["energy_j"] is None:
        return ""
    source = f" ({hardware['energy_source']})" if hardware["energy_source"] else ""
    return f.energy(hardware["energy_j"]) + source


def _mean(hardware: dict[str, Any], name: str, unit: str) -> str:
    stats = hardware[name]
    if stats is None:
        return ""
    return f"mean {f.short(stats['mean'])}{f.NBSP}{unit}, 95 % of readings up to" + (
        f" {f.short(stats['p95'])}{f.NBSP}{unit}"
    )


def _temperature(hardware: dict[str, Any]) -> str:
    stats, limits = hardware["temperature_c"], hardware["temperature_limits_c"] or {}
    if stats is None:
        return ""
    own = ", ".join(
        f"{f.words(name)} {value:.0f}{f.NBSP}\u00b0C" for name, value in sorted(limits.items())
    )
    return f"{stats['max']:.0f}{f.NBSP}\u00b0C" + (
        f"; the device's own limits: {own}" if own else ""
    )


def _throttled(seconds: dict[str, float] | None) -> str:
    if seconds is None:
        return ""
    causes = [f"{f.words(cause)} {f.duration(s)}" for cause, s in sorted(seconds.items()) if s > 0]
    return ", ".join(causes) or "never"


def _clocks(hardware: dict[str, Any]) -> str:
    named = (("SM", "sm_clock_mhz"), ("memory", "memory_clock_mhz"))
    known = [(name, hardware[key]["mean"]) for name, key in named if hardware[key]]
    return ", ".join(f"{name} {f.count(mean)}{f.NBSP}MHz in the mean" for name, mean in known)


def _two_rates(hardware: dict[str, Any], to_card: str, from_card: str) -> str:
    named = (("to the card", to_card), ("from it", from_card))
    known = [(name, hardware[key]["mean"]) for name, key in named if hardware[key]]
    return ", ".join(f"{f.size(mean)}/s {name}" for name, mean in known)


def _disk(hardware: dict[str, Any]) -> str:
    read, written = hardware["disk_read_bytes"], hardware["disk_write_bytes"]
    if read is None or written is None:
        return ""
    return f"{f.size(read)} read, {f.size(written)} written, by the whole machine"


def _monitor(hardware: dict[str, Any]) -> str:
    share = look_up(hardware, "monitor_cpu_fraction")
    return "" if share is None else f"{100 * share:.2g}{f.NBSP}% of one core"
