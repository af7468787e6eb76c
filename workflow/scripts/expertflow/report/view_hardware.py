"""Say in a few lines what the machine was, what the monitor saw, and where data were read from.

What was not read is left to its reason.
"""

from typing import Any

from expertflow.report import format as f

Report = dict[str, Any]
ACTIONS = {
    "read_in_place": "in place",
    "pre_read": "in place, read into memory beforehand",
    "copied": "copied by training",
    "reused": "a copy that was there, verified",
}


def rows(report: Report) -> list[tuple[str, str]]:
    hardware = report["training_report"]["hardware"]
    share = hardware["monitor_cpu_fraction"]
    clocks = [(name, f"{f.count(mean)}{f.NBSP}MHz in the mean") for name, mean in _means(
        hardware, ("SM", "sm_clock_mhz"), ("memory", "memory_clock_mhz"))]  # fmt: skip
    rates = _means(
        hardware, ("to the card", "pcie_rx_bytes_per_s"), ("from it", "pcie_tx_bytes_per_s")
    )
    found = [
        ("Energy", _energy(hardware)),
        ("Power", _power(hardware["power_w"])),
        ("Hottest", _temperature(hardware)),
        ("Held back", _throttled(hardware["throttle_s"])),
        ("Clocks", ", ".join(f"{name} {text}" for name, text in clocks)),
        ("PCIe", ", ".join(f"{f.size(mean)}/s {name}" for name, mean in rates)),
        ("Disk", _disk(hardware)),
        ("Monitor itself", "" if share is None else f"{100 * share:.2g}{f.NBSP}% of one core"),
    ]
    return [(name, text) for name, text in found if text]


def machine(report: Report) -> list[tuple[str, str]]:
    """Return (name, text) for the machine that trained, as it described itself before it began."""
    facts = report["training_report"]["hardware"]["machine"] or {}
    cores = [
        f"{facts[key]} {name}"
        for key, name in (("n_cpus_physical", "physical cores"), ("n_cpus_usable", "usable"))
        if facts.get(key) is not None
    ]
    model = [facts["cpu_model"]] if facts.get("cpu_model") else []
    total, usable = facts.get("ram_total_bytes"), facts.get("ram_usable_bytes")
    less = "" if usable in (None, total) else f", {f.size(usable)} usable"
    found = [
        ("processor", ", ".join([*model, *cores])),
        ("memory", "" if total is None else f.size(total) + less),
        ("scratch", "; ".join(_disk_place(place) for place in facts.get("scratch") or ())),
    ]
    return [(name, text) for name, text in found if text]


def _disk_place(place: dict[str, Any]) -> str:
    free, speed = place.get("free_bytes"), place.get("read_bytes_per_s")
    parts = ["memory" if place.get("is_memory") else place.get("file_system")]
    parts += [None if free is None else f"{f.size(free)} free"]
    parts += [None if speed is None else f"{f.size(speed)}/s read"]
    return f"{place.get('path')} ({', '.join(part for part in parts if part)})"


def _energy(hardware: Report) -> str:
    if hardware["energy_j"] is None:
        return ""
    source = f" ({hardware['energy_source']})" if hardware["energy_source"] else ""
    return f.energy(hardware["energy_j"]) + source


def _power(stats: dict[str, float] | None) -> str:
    if stats is None:
        return ""
    mean, high = (f"{f.short(stats[key])}{f.NBSP}W" for key in ("mean", "p95"))
    return f"mean {mean}, 95 % of readings up to {high}"


def _temperature(hardware: Report) -> str:
    stats, limits = hardware["temperature_c"], hardware["temperature_limits_c"] or {}
    if stats is None:
        return ""
    own = ", ".join(
        f"{f.words(k)} {value:.0f}{f.NBSP}\u00b0C" for k, value in sorted(limits.items())
    )
    limit = f"; the device's own limits: {own}" if own else ""
    return f"{stats['max']:.0f}{f.NBSP}\u00b0C{limit}"


def _throttled(seconds: dict[str, float] | None) -> str:
    if seconds is None:
        return ""
    causes = [f"{f.words(cause)} {f.duration(s)}" for cause, s in sorted(seconds.items()) if s > 0]
    return ", ".join(causes) or "never"


def _means(hardware: Report, *named: tuple[str, str]) -> list[tuple[str, float]]:
    return [(name, hardware[key]["mean"]) for name, key in named if hardware[key]]


def _disk(hardware: Report) -> str:
    read, written = hardware["disk_read_bytes"], hardware["disk_write_bytes"]
    if read is None or written is None:
        return ""
    return f"{f.size(read)} read, {f.size(written)} written, by the whole machine"


def staging(report: Report) -> list[tuple[str, str]]:
    """Return (name, text) by what training did; where it noted nothing, by what was planned."""
    section = report["staging"]
    planned = {"rows": section, "weights": section["weights"]}
    notes = planned if section["used"] is None else section["used"]
    return [
        (f"{kind} read from", _staged(note, planned[kind])) for kind, note in sorted(notes.items())
    ]


def _staged(note: Report, planned: Report) -> str:
    action = ACTIONS.get(note["action"]) or str(note["action"])
    action = "a fallback" if note["is_fallback"] else action
    facts = [f.size(note["n_bytes"]), action]
    speed = note["copy_bytes_per_s"] or (planned["copy_bytes_per_s"] if note["target"] else None)
    if speed is not None:
        facts.append(f"copied at {f.size(speed)}/s")
    return f"{note['target'] or note['source']} ({', '.join(facts)}): {note['reason']}"
