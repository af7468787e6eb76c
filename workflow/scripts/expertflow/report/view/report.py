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


class Cell(Record, frozen=True, kw_only=True):
    """A shown value. ``reason`` is set exactly where there is none."""

    text: str
    reason: str | None = None


class Tile(Record, frozen=True, kw_only=True):
    """One of the figures at the top."""

    label: str
    value: Cell
    note: str


class Part(Record, frozen=True, kw_only=True):
    """A part of wall time. ``colour`` names a CSS variable."""

    label: str
    colour: str
    seconds: float
    fraction: float


def cell(report: Report, path: str, show: Show, *, blank: str = NOT_MEASURED) -> Cell:
    value = look_up(report, path)
    if value is None:
        return Cell(text=blank, reason=report["unavailable"].get(path, "no reason was recorded"))
    return Cell(text=show(value))


def tiles(report: Report) -> tuple[Tile, ...]:
    n_devices = report["training_parameters"]["world_size"]
    speed = "no padding" if n_devices == 1 else f"no padding, {n_devices} devices"
    return (
        _score_tile(report),
        Tile(
            label="Held-out loss",
            value=cell(report, "evaluation.after.held_out_loss", f.loss),
            note=f"before {f.loss(report['evaluation']['before']['held_out_loss'])}",
        ),
        Tile(
            label="Wall time",
            value=cell(report, "time.wall_s", f.duration),
            note=_planned(report, "plan.hours", f.hours, report["time"]["wall_s"] / 3600),
        ),
        Tile(
            label="Cost",
            value=cell(report, "cost.usd", f.usd),
            note=_planned(report, "plan.usd", f.usd, report["cost"]["usd"]),
        ),
        _tile(report, "Useful tokens/s", "throughput.useful_tokens_per_s", f.short, speed),
        _tile(report, "MFU", "throughput.mfu_fraction", f.percent, _peak(report)),
        _tile(report, "Goodput", "throughput.goodput_fraction", f.percent, "of wall time trained"),
        _memory_tile(report),
    )


def _tile(report: Report, label: str, path: str, show: Show, note: str) -> Tile:
    return Tile(label=label, value=cell(report, path, show), note=note)


def _score_tile(report: Report) -> Tile:
    evaluation = report["evaluation"]
    if evaluation["task"] == "held_out_loss":
        note = f"before {f.short(evaluation['before']['perplexity'])}"
        return _tile(report, "Perplexity", "evaluation.after.perplexity", f.short, note)
    label = f.sentence(f.words(evaluation["metric"] or evaluation["task"]))
    before = evaluation["before"]["value_fraction"]
    note = "" if before is None else f"before {f.tenths(before)}"
    best = best_baseline(evaluation)
    if note and best is not None:
        note += f" \u00b7 {best['name']}{f.NBSP}{f.tenths(best['value_fraction'])}"
    return _tile(report, label, "evaluation.after.value_fraction", f.tenths, note)


def _memory_tile(report: Report) -> Tile:
    hardware = report["training_report"]["hardware"]
    if hardware["gpu"]["name"] is None:
        path = "training_report.hardware.host_memory_peak_bytes"
        return _tile(report, "Peak memory", path, f.size, "of the training process")
    total = hardware["gpu"]["memory_total_bytes"]
    path = "training_report.hardware.memory_peak_reserved_bytes"
    peak = hardware["memory_peak_reserved_bytes"]
    note = "" if total is None else f"of {f.size(total)}"
    if total and peak is not None:
        note += f" \u00b7 {f.percent(1 - peak / total)} free"
    return _tile(report, "Peak GPU memory", path, f.size, note)


def _planned(report: Report, path: str, show: Show, actual: float | None) -> str:
    planned = look_up(report, path)
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
    passes, optimizer_s = (time["forward_s"], time["backward_s"]), time["optimizer_s"]
    parts = [("Training steps", "blue", time["train_s"])]
    if None not in passes and optimizer_s is not None:
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
    wall_s = time["wall_s"]
    return tuple(
        Part(label=label, colour=colour, seconds=s, fraction=s / wall_s if wall_s else 0.0)
        for label, colour, s in parts
        if s is not None and s > 0
    )


def split_note(report: Report) -> str:
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
