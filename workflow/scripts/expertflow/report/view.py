"""Convert report.json into display values: texts, shares, and reasons for blanks."""

from collections.abc import Callable
from typing import Any, NamedTuple

from expertflow.report import format as f
from expertflow.report.diagnose import look_up
from expertflow.report.format import NBSP
from expertflow.report.learned import best_baseline
from expertflow.report.measured import NO_REASON

Report = dict[str, Any]
Show = Callable[[Any], str]

NOT_MEASURED = "not measured"
METHODS = {"lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}
# Format of plan-versus-actual figures by unit: names in ``format``.
SHOWN = {
    "steps": "count", "tokens": "short", "tokens/s": "short", "h": "hours", "usd": "usd",
    "bytes": "size",
}  # fmt: skip
MEMORY_PARTS = (
    ("model_bytes", "Model", "blue"),
    ("optimizer_bytes", "Gradients and optimizer", "green"),
    ("step_bytes", "Activations and loss, at worst", "purple"),
    ("reserve_bytes", "Allocator and context", "gray"),
)
# kind of kernel -> its name on the page, and its color
KERNELS = {
    "attention": ("Attention", "purple"),
    "matmul": ("Matrix products", "blue"),
    "loss": ("Loss", "red"),
    "optimizer": ("Optimizer", "green"),
    "elementwise": ("Norms, elementwise", "orange"),
    "copies": ("Copies", "yellow"),
    "communication": ("Communication", "gray"),
    "other": ("Other", "faint"),
}
STAGED = {
    "read_in_place": "in place",
    "pre_read": "in place, read into memory beforehand",
    "copied": "copied by training",
    "reused": "a copy that was there, verified",
}


class Cell(NamedTuple):
    """A displayed value. ``reason`` is set exactly where there is none."""

    text: str
    reason: str | None = None


class Tile(NamedTuple):
    label: str
    value: Cell
    note: str


class Part(NamedTuple):
    """A part of a bar. ``color`` names a CSS variable."""

    label: str
    color: str
    amount: float
    fraction: float


def cell(report: Report, path: str, show: Show, blank: str = NOT_MEASURED) -> Cell:
    value = look_up(report, path)
    if value is None:
        return Cell(blank, report["unavailable"].get(path, NO_REASON))
    return Cell(show(value))


def tiles(report: Report) -> tuple[Tile, ...]:
    n_devices, plan, cost = report["training_parameters"]["world_size"], report["plan"], "cost.usd"
    before, hours = report["evaluation"]["before"]["held_out_loss"], report["cost"]["hours"]
    speed = "no padding" if n_devices == 1 else f"no padding, {n_devices} devices"
    rows: tuple[tuple[str, str, Show, str], ...] = (
        _score_tile(report),
        ("Held-out loss", "evaluation.after.held_out_loss", f.loss, f"before {f.loss(before)}"),
        ("Wall time", "time.wall_s", f.duration, _planned(plan["hours"], f.hours, hours)),
        ("Cost", cost, f.usd, _planned(plan["usd"], f.usd, report["cost"]["usd"])),
        ("Useful tokens/s", "throughput.useful_tokens_per_s", f.short, speed),
        ("MFU", "throughput.mfu_fraction", f.percent, _peak(report)),
        ("Goodput", "throughput.goodput_fraction", f.percent, "of wall time trained"),
        _memory_tile(report),
    )
    return tuple(Tile(label, cell(report, path, show), note) for label, path, show, note in rows)


def _score_tile(report: Report) -> tuple[str, str, Show, str]:
    evaluation, before = report["evaluation"], report["evaluation"]["before"]
    if evaluation["task"] == "held_out_loss":
        note = f"before {f.short(before['perplexity'])}"
        return "Perplexity", "evaluation.after.perplexity", f.short, note
    label, note = f.sentence(f.words(evaluation["metric"] or evaluation["task"])), ""
    if before["value_fraction"] is not None:
        note = f"before {f.tenths(before['value_fraction'])}"
        if best := best_baseline(evaluation):
            note += f" \u00b7 {best['name']}{NBSP}{f.tenths(best['value_fraction'])}"
    return label, "evaluation.after.value_fraction", f.tenths, note


def _memory_tile(report: Report) -> tuple[str, str, Show, str]:
    hardware, place = report["training_report"]["hardware"], "training_report.hardware"
    if hardware["gpu"]["name"] is None:
        path = f"{place}.host_memory_peak_bytes"
        return "Peak memory", path, f.size, "of the training process"
    total, peak = hardware["gpu"]["memory_total_bytes"], hardware["memory_peak_reserved_bytes"]
    note = "" if total is None else f"of {f.size(total)}"
    if total and peak is not None:
        note += f" \u00b7 {f.percent(1 - peak / total)} free"
    return "Peak GPU memory", f"{place}.memory_peak_reserved_bytes", f.size, note


def _planned(planned: float | None, show: Show, actual: float | None) -> str:
    if planned is None:
        return "no prediction"
    is_open = not planned or actual is None
    difference = "" if is_open else f" \u00b7 {f.signed_percent((actual or 0.0) / planned - 1)}"
    return f"plan {show(planned)}{difference}"


def _peak(report: Report) -> str:
    flops_per_s = report["training_report"]["hardware"]["gpu"]["peak_flops_per_s"]
    settings = report["training_parameters"]
    precision = "bf16" if settings["bf16"] else "fp16" if settings["fp16"] else "fp32"
    return "" if flops_per_s is None else f"of {f.flops(flops_per_s)} {precision}"


def time_parts(report: Report) -> tuple[Part, ...]:
    """Split wall time for the bar; leave out copies that are part of ``train_s``."""
    time = report["time"]
    optimizer_s, wall_s = time["optimizer_s"], time["wall_s"]
    parts = [("Training steps", "blue", time["train_s"])]
    if None not in (time["forward_s"], time["backward_s"], optimizer_s):
        parts = [
            ("Forward and backward", "blue", time["train_s"] - optimizer_s),
            ("Optimizer", "green", optimizer_s),
        ]
    parts += [
        ("Waiting for data", "orange", time["data_wait_s"]),
        ("Copies to the GPU", "red", time["h2d_s"]),
        ("Checkpoints", "yellow", time["checkpoint_s"]),
        ("Evaluation", "purple", time["eval_s"]),
        ("Start-up and model load", "gray", time["startup_s"]),
        ("Other", "faint", time["other_s"]),
    ]
    return tuple(
        Part(label, color, s, s / wall_s if wall_s else 0.0)
        for label, color, s in parts
        if s is not None and s > 0
    )


def split_note(report: Report) -> str:
    sampled = report["training_report"]["training"]["sampled_steps"]
    if report["time"]["split_source"] != "sampled steps" or sampled is None:
        return ""
    return (
        "Forward, backward, optimizer and copies share the time of all steps as they did in "
        f"{f.count(sampled['n_steps'])} sampled steps, timed on the device."
    )


def subject(report: Report) -> str:
    run, model = report["run"], report["model"]
    lora = f" r{model['lora']['r']}" if model["lora"] else ""
    method = METHODS.get(model["method"], model["method"])
    parts = [run["expert"], model["name"], method + lora, f"preset {run['preset']}"]
    return " \u00b7 ".join([*parts, "simulated hardware readings"] if run["simulated"] else parts)


def memory(report: Report) -> dict[str, Any] | None:
    planned, hardware = report["plan"]["memory"], report["training_report"]["hardware"]
    if planned is None or hardware["gpu"]["name"] is None:
        return None
    actual, total = hardware["memory_peak_reserved_bytes"], hardware["gpu"]["memory_total_bytes"]
    predicted = sum(planned[key] for key, _, _ in MEMORY_PARTS)
    scale = max(predicted, actual or 0, total or 0) or 1
    return {
        "parts": [
            Part(label, color, planned[key], planned[key] / scale)
            for key, label, color in MEMORY_PARTS
        ],
        "predicted": predicted,
        "total": total,
        "actual_fraction": None if actual is None else actual / scale,
    }


def kernel_notes(report: Report) -> list[str]:
    profile = report["profile"]
    busy, trace = profile["device_busy_fraction"], profile["trace"]
    kinds = (
        "Kinds go by the names of kernels; the products and sums of the loss have common ones and"
        " count as these."
    )
    if busy is not None:
        kinds = f"A kernel ran in {f.tenths(busy)} of these steps. {kinds}"
    if profile["device"] == "cpu":
        kinds = (
            "On a CPU these are operators, by the seconds that each spent itself on any thread;"
            " other holds views, allocations and the calls of the automatic differentiation."
        )
    before, overhead = profile["neighbor_step_s"], profile["overhead_fraction"]
    cost = f"Watched, a step took {f.short_time(profile['step_s'])}"
    if before is not None and overhead is not None:
        n = profile["n_neighbor_steps"]
        ones = "that before" if n == 1 else f"each of the {n} before"
        cost += f", {ones} {f.short_time(before)} ({f.signed_percent(overhead)})"
    cost += f"; training waited {f.duration(profile['pause_s'])} for the profile. Both are in"
    where = f"No trace: {report['unavailable'].get('profile.trace', NO_REASON)}."
    if trace is not None:
        size = f.size(profile["n_trace_bytes"])
        where = f"{trace} ({size}) is the trace, to be opened in Perfetto."
    notes = [f"{f.sentence(note)}." for note in profile["notes"]]
    return [kinds, f"{cost} this report\u2019s times.", where, *notes]


def hardware_rows(report: Report) -> list[tuple[str, str]]:
    hardware = report["training_report"]["hardware"]
    energy, source = hardware["energy_j"], hardware["energy_source"]
    power, hot, held = hardware["power_w"], hardware["temperature_c"], hardware["throttle_s"]
    limits = sorted((hardware["temperature_limits_c"] or {}).items())
    own = ", ".join(f"{f.words(name)} {limit:.0f}{NBSP}\u00b0C" for name, limit in limits)
    own = f"; the device's own limits: {own}" if own else ""
    causes = [f"{f.words(k)} {f.duration(s)}" for k, s in sorted((held or {}).items()) if s > 0]
    read, written = hardware["disk_read_bytes"], hardware["disk_write_bytes"]
    share, disk = hardware["monitor_cpu_fraction"], ""
    if None not in (read, written):
        disk = f"{f.size(read)} read, {f.size(written)} written, by the whole machine"

    def watts(key: str) -> str:
        return f"{f.short(power[key])}{NBSP}W"

    def means(show: Callable[[str, float], str], *named: tuple[str, str]) -> str:
        return ", ".join(show(name, hardware[key]["mean"]) for name, key in named if hardware[key])

    clocks = means(
        lambda name, mhz: f"{name} {f.count(mhz)}{NBSP}MHz in the mean",
        ("SM", "sm_clock_mhz"),
        ("memory", "memory_clock_mhz"),
    )
    rates = means(
        lambda name, rate: f"{f.size(rate)}/s {name}",
        ("to the card", "pcie_rx_bytes_per_s"),
        ("from it", "pcie_tx_bytes_per_s"),
    )
    return _known(
        ("Energy", energy is not None and f.energy(energy) + (f" ({source})" if source else "")),
        ("Power", power and f"mean {watts('mean')}, 95 % of readings up to {watts('p95')}"),
        ("Hottest", hot and f"{hot['max']:.0f}{NBSP}\u00b0C{own}"),
        ("Held back", held is not None and (", ".join(causes) or "never")),
        ("Clocks", clocks),
        ("PCIe", rates),
        ("Disk", disk),
        ("Monitor itself", share is not None and f"{100 * share:.2g}{NBSP}% of one core"),
    )


def _known(*rows: tuple[str, Any]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in rows if text]


def machine(report: Report) -> list[tuple[str, str]]:
    facts = report["training_report"]["hardware"]["machine"] or {}
    cores = [
        f"{facts[key]} {name}"
        for key, name in (("n_cpus_physical", "physical cores"), ("n_cpus_usable", "usable"))
        if facts.get(key) is not None
    ]
    model = [facts["cpu_model"]] if facts.get("cpu_model") else []
    total, usable = facts.get("ram_total_bytes"), facts.get("ram_usable_bytes")
    less = "" if usable in (None, total) else f", {f.size(usable)} usable"
    return _known(
        ("processor", ", ".join([*model, *cores])),
        ("memory", total is not None and f.size(total) + less),
        ("scratch", "; ".join(_disk_place(place) for place in facts.get("scratch") or ())),
    )


def _disk_place(place: dict[str, Any]) -> str:
    free, speed = place.get("free_bytes"), place.get("read_bytes_per_s")
    parts = ["memory" if place.get("is_memory") else place.get("file_system")]
    parts += [None if free is None else f"{f.size(free)} free"]
    parts += [None if speed is None else f"{f.size(speed)}/s read"]
    return f"{place.get('path')} ({', '.join(part for part in parts if part)})"


def staging(report: Report) -> list[tuple[str, str]]:
    """Return (name, text) by what training did, or by the plan if it noted nothing."""
    section = report["staging"]
    planned, found = {"rows": section, "weights": section["weights"]}, []
    for kind, note in sorted((planned if section["used"] is None else section["used"]).items()):
        action = STAGED.get(note["action"]) or str(note["action"])
        facts = [f.size(note["n_bytes"]), "a fallback" if note["is_fallback"] else action]
        copied = planned[kind]["copy_bytes_per_s"] if note["target"] else None
        speed = note["copy_bytes_per_s"] or copied
        if speed is not None:
            facts.append(f"copied at {f.size(speed)}/s")
        place = note["target"] or note["source"]
        found.append((f"{kind} read from", f"{place} ({', '.join(facts)}): {note['reason']}"))
    return found
