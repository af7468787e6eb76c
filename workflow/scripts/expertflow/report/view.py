"""Turn report.json into what a page or a terminal shows: texts, shares, and reasons for blanks."""

from collections.abc import Callable
from typing import Any

from expertflow.core.records import Record
from expertflow.report import format as f
from expertflow.report.diagnose import look_up
from expertflow.report.learned import best_baseline

Report = dict[str, Any]
Show = Callable[[Any], str]

NOT_MEASURED = "not measured"
METHODS = {"lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}
# How figures of plan against actual are written, by their unit: names in ``format``.
SHOWN = {
    "steps": "count", "tokens": "short", "tokens/s": "short", "h": "hours", "usd": "usd",
    "bytes": "size",
}  # fmt: skip
MEMORY_PARTS = (
    ("model_bytes", "Model", "blue"),
    ("optimizer_bytes", "Gradients and optimiser", "green"),
    ("step_bytes", "Activations and loss, at worst", "purple"),
    ("reserve_bytes", "Allocator and context", "grey"),
)
# kind of kernel -> what the page calls it, and its colour
KERNELS = {
    "attention": ("Attention", "purple"),
    "matmul": ("Matrix products", "blue"),
    "loss": ("Loss", "red"),
    "optimiser": ("Optimiser", "green"),
    "elementwise": ("Norms, elementwise", "orange"),
    "copies": ("Copies", "yellow"),
    "communication": ("Communication", "grey"),
    "other": ("Other", "faint"),
}


class Cell(Record, frozen=True):
    """A shown value. ``reason`` is set exactly where there is none."""

    text: str
    reason: str | None = None


class Tile(Record, frozen=True):
    """One of the figures at the top."""

    label: str
    value: Cell
    note: str


class Part(Record, frozen=True):
    """A part of a bar. ``colour`` names a CSS variable."""

    label: str
    colour: str
    amount: float
    fraction: float


def cell(report: Report, path: str, show: Show, blank: str = NOT_MEASURED) -> Cell:
    """Show the value at a dotted path, or say why there is none."""
    value = look_up(report, path)
    if value is None:
        return Cell(blank, report["unavailable"].get(path, "no reason was recorded"))
    return Cell(show(value))


def tiles(report: Report) -> tuple[Tile, ...]:
    n_devices, cost = report["training_parameters"]["world_size"], report["cost"]
    before = report["evaluation"]["before"]["held_out_loss"]

    def tile(label: str, path: str, show: Show, note: str) -> Tile:
        return Tile(label, cell(report, path, show), note)

    speed = "no padding" if n_devices == 1 else f"no padding, {n_devices} devices"
    return (
        tile(*_score_tile(report)),
        tile("Held-out loss", "evaluation.after.held_out_loss", f.loss, f"before {f.loss(before)}"),
        tile("Wall time", "time.wall_s", f.duration,
             _planned(report["plan"]["hours"], f.hours, report["time"]["wall_s"] / 3600)),
        tile("Cost", "cost.usd", f.usd, _planned(report["plan"]["usd"], f.usd, cost["usd"])),
        tile("Useful tokens/s", "throughput.useful_tokens_per_s", f.short, speed),
        tile("MFU", "throughput.mfu_fraction", f.percent, _peak(report)),
        tile("Goodput", "throughput.goodput_fraction", f.percent, "of wall time trained"),
        tile(*_memory_tile(report)),
    )  # fmt: skip


def _score_tile(report: Report) -> tuple[str, str, Show, str]:
    evaluation = report["evaluation"]
    if evaluation["task"] == "held_out_loss":
        note = f"before {f.short(evaluation['before']['perplexity'])}"
        return "Perplexity", "evaluation.after.perplexity", f.short, note
    label = f.sentence(f.words(evaluation["metric"] or evaluation["task"]))
    before, best = evaluation["before"]["value_fraction"], best_baseline(evaluation)
    note = "" if before is None else f"before {f.tenths(before)}"
    if note and best is not None:
        note += f" \u00b7 {best['name']}{f.NBSP}{f.tenths(best['value_fraction'])}"
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
    text = f"plan {show(planned)}"
    if not planned or actual is None:
        return text
    return f"{text} \u00b7 {f.signed_percent(actual / planned - 1)}"


def _peak(report: Report) -> str:
    flops_per_s = report["training_report"]["hardware"]["gpu"]["peak_flops_per_s"]
    if flops_per_s is None:
        return ""
    settings = report["training_parameters"]
    precision = "bf16" if settings["bf16"] else "fp16" if settings["fp16"] else "fp32"
    return f"of {f.flops(flops_per_s)} {precision}"


def time_parts(report: Report) -> tuple[Part, ...]:
    """Split wall time for the bar; the step is split further where its parts were measured.

    Copies that are a part of ``train_s`` are not in it: the two stay apart in the report.
    """
    time = report["time"]
    optimizer_s, wall_s = time["optimizer_s"], time["wall_s"]
    parts = [("Training steps", "blue", time["train_s"])]
    if None not in (time["forward_s"], time["backward_s"], optimizer_s):
        parts = [
            ("Forward and backward", "blue", time["train_s"] - optimizer_s),
            ("Optimiser", "green", optimizer_s),
        ]
    parts += [
        ("Waiting for data", "orange", time["data_wait_s"]),
        ("Copies to the GPU", "red", time["h2d_s"]),
        ("Checkpoints", "yellow", time["checkpoint_s"]),
        ("Evaluation", "purple", time["eval_s"]),
        ("Start-up and model load", "grey", time["startup_s"]),
        ("Other", "faint", time["other_s"]),
    ]
    return tuple(
        Part(label, colour, s, s / wall_s if wall_s else 0.0)
        for label, colour, s in parts
        if s is not None and s > 0
    )


def split_note(report: Report) -> str:
    """Say where the split of a step comes from, unless the host timed every part itself."""
    time, sampled = report["time"], report["training_report"]["training"]["sampled_steps"]
    if time["split_source"] != "sampled steps" or sampled is None:
        return ""
    return (
        f"Forward, backward, optimiser and copies share the time of all steps as they did in "
        f"{f.count(sampled['n_steps'])} sampled steps, timed on the device."
    )


def subject(report: Report) -> str:
    run, model = report["run"], report["model"]
    lora = f" r{model['lora']['r']}" if model["lora"] else ""
    method = METHODS.get(model["method"], model["method"])
    parts = [run["expert"], model["name"], method + lora, f"preset {run['preset']}"]
    return " \u00b7 ".join([*parts, "simulated hardware readings"] if run["simulated"] else parts)


def preset_note(report: Report) -> str:
    if report["run"]["preset"] != "demo":
        return ""
    return (
        "Demo preset: a small model and few steps. It shows that the chain works and learns; its "
        "figures say nothing about a full model."
    )


def memory(report: Report) -> dict[str, Any] | None:
    planned, hardware = report["plan"]["memory"], report["training_report"]["hardware"]
    if planned is None or hardware["gpu"]["name"] is None:
        return None
    actual, total = hardware["memory_peak_reserved_bytes"], hardware["gpu"]["memory_total_bytes"]
    predicted = sum(planned[key] for key, _, _ in MEMORY_PARTS)
    scale = max(predicted, actual or 0, total or 0) or 1
    return {
        "parts": [
            Part(label, colour, planned[key], planned[key] / scale)
            for key, label, colour in MEMORY_PARTS
        ],
        "predicted": predicted,
        "total": total,
        "actual_fraction": None if actual is None else actual / scale,
    }


def kernel_notes(report: Report) -> list[str]:
    """Say what the kinds of a profile go by, what watching cost, and where the trace is."""
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
    before, overhead = profile["neighbour_step_s"], profile["overhead_fraction"]
    cost = f"Watched, a step took {f.short_time(profile['step_s'])}"
    if before is not None and overhead is not None:
        n = profile["n_neighbour_steps"]
        ones = "that before" if n == 1 else f"each of the {n} before"
        cost += f", {ones} {f.short_time(before)} ({f.signed_percent(overhead)})"
    cost += f"; training waited {f.duration(profile['pause_s'])} for the profile. Both are in"
    why = report["unavailable"].get("profile.trace", "no reason was recorded")
    where = f"No trace: {why}."
    if trace is not None:
        size = f.size(profile["n_trace_bytes"])
        where = f"{trace} ({size}) is the trace, to be opened in Perfetto."
    notes = [f"{f.sentence(note)}." for note in profile["notes"]]
    return [kinds, f"{cost} this report\u2019s times.", where, *notes]
