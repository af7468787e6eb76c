"""Turn report.json into what a page or a terminal shows: texts, shares, and reasons for blanks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expertflow.report import format as f
from expertflow.report.diagnose import look_up

Report = dict[str, Any]
Show = Callable[[Any], str]

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A shown value. ``reason`` is set exactly where there is none."""

    text: str
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One of the figures at the top."""

    label: str
    value: Cell
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of wall time. ``colour`` names a CSS variable."""

    label: str
    colour: str
    seconds: float
    fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A prediction beside what came of it."""

    label: str
    plan: Cell
    band: str
    actual: Cell
    difference: str


def cell(report: Report, path: str, show: Show, *, blank: str = NOT_MEASURED) -> Cell:
    """Show the value at a dotted path, or say why there is none."""
    value = look_up(report, path)
    if value is None:
        return Cell(text=blank, reason=report["unavailable"].get(path, "no reason was recorded"))
    return Cell(text=show(value))


def tiles(report: Report) -> tuple[Tile, ...]:
    """Give the eight figures that say most: learned, spent, and how well."""
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
            note=_planned(report, "plan.hours", f.hours),
        ),
        Tile(
            label="Cost",
            value=cell(report, "cost.usd", f.usd),
            note=_planned(report, "plan.usd", f.usd),
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
    label = f.words(evaluation["metric"] or evaluation["task"]).capitalize()
    before = evaluation["before"]["value_fraction"]
    note = "" if before is None else f"before {f.tenths(before)}"
    return _tile(report, label, "evaluation.after.value_fraction", f.tenths, note)


def _memory_tile(report: Report) -> Tile:
    hardware = report["training_report"]["hardware"]
    if hardware["gpu"]["name"] is None:
        path = "training_report.hardware.host_memory_peak_bytes"
        return _tile(report, "Peak memory", path, f.size, "of the training process")
    total = hardware["gpu"]["memory_total_bytes"]
    path = "training_report.hardware.memory_peak_reserved_bytes"
    note = "" if total is None else f"of {f.size(total)}"
    return _tile(report, "Peak GPU memory", path, f.size, note)


def _planned(report: Report, path: str, show: Show) -> str:
    value = look_up(report, path)
    return "no prediction" if value is None else f"plan {show(value)}"


def _peak(report: Report) -> str:
    flops_per_s = report["training_report"]["hardware"]["gpu"]["peak_flops_per_s"]
    return "" if flops_per_s is None else f"of {f.flops(flops_per_s)}, dense"


def time_parts(report: Report) -> tuple[Part, ...]:
    """Split wall time for the bar; the step is split further where its parts were measured."""
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
        ("Held-out evaluation", "purple", time["eval_s"]),
        ("Start-up and model load", "grey", time["startup_s"]),
        ("Other", "faint", time["other_s"]),
    ]
    wall_s = time["wall_s"]
    return tuple(
        Part(label=label, colour=colour, seconds=s, fraction=s / wall_s if wall_s else 0.0)
        for label, colour, s in parts
        if s is not None and s > 0
    )


def plan_rows(report: Report) -> tuple[PlanRow, ...]:
    """Lay every prediction beside the measurement that answers it."""
    steps = "training_report.training.steps"
    memory = "training_report.hardware.memory_peak_reserved_bytes"
    timed = {**report, "wall_hours": report["time"]["wall_s"] / 3600}
    return (
        _plan_row(report, "Optimiser steps", "plan.steps", steps, f.count),
        _plan_row(report, "Trained tokens", "plan.trained_tokens", "data.trained_tokens", f.short),
        _plan_row(timed, "Wall time", "plan.hours", "wall_hours", f.hours, "hours"),
        _plan_row(report, "Cost", "plan.usd", "cost.usd", f.usd, "usd"),
        _plan_row(report, "Peak device memory", "plan.memory_peak_bytes", memory, f.size),
    )


def _plan_row(
    report: Report, label: str, plan: str, actual: str, show: Show, band: str = ""
) -> PlanRow:
    planned, found = look_up(report, plan), look_up(report, actual)
    difference = ""
    if planned and found is not None:
        difference = f.signed_percent(found / planned - 1) if found != planned else "0"
    low = look_up(report, f"plan.band.{band}_low") if band else None
    high = look_up(report, f"plan.band.{band}_high") if band else None
    return PlanRow(
        label=label,
        plan=cell(report, plan, show, blank="not predicted"),
        band="" if low is None or high is None else f"{show(low)} to {show(high)}",
        actual=cell(report, actual, show),
        difference=difference,
    )


def subject(report: Report) -> str:
    """Name the run in one line: expert, model, method, preset."""
    run, model = report["run"], report["model"]
    lora = f" r{model['lora']['r']}" if model["lora"] else ""
    parts = [run["expert"], model["name"], model["method"] + lora, f"preset {run['preset']}"]
    return " \u00b7 ".join([*parts, "simulated hardware readings"] if run["simulated"] else parts)


def preset_note(report: Report) -> str:
    """Warn of what a preset's figures cannot show."""
    if report["run"]["preset"] != "demo":
        return ""
    return (
        "Demo preset: a small model and few steps. It shows that the chain works and learns; its "
        "figures say nothing about a full model."
    )
