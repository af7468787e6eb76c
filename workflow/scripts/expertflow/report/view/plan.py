"""Lay the plan beside what came of it: predictions, memory, other hardware, other people's claims.

Texts only; the reasons for blanks come from the report.
"""

from typing import Any

from expertflow.core.records import Record
from expertflow.report import format as f
from expertflow.report.diagnose import look_up
from expertflow.report.view.report import Cell, Part, Show, cell

Report = dict[str, Any]

SHOWN: dict[str, Show] = {
    "steps": f.count,
    "tokens": f.short,
    "tokens/s": f.short,
    "h": f.hours,
    "usd": f.usd,
    "bytes": f.size,
}
MEMORY_PARTS = (
    ("model_bytes", "Model", "blue"),
    ("optimizer_bytes", "Gradients and optimiser", "green"),
    ("step_bytes", "Activations and loss, at worst", "purple"),
    ("reserve_bytes", "Allocator and context", "grey"),
)


class PlanRow(Record, frozen=True, kw_only=True):
    """A prediction beside what came of it."""

    label: str
    plan: Cell
    band: str
    actual: Cell
    difference: str
    is_inside: bool | None


class Memory(Record, frozen=True, kw_only=True):
    """What a peak should consist of, as parts of the card, and the peak that came."""

    parts: tuple[Part, ...]
    predicted: str
    actual: Cell
    total: str
    actual_fraction: float | None
    total_fraction: float | None


class Option(Record, frozen=True, kw_only=True):
    """The same work on other hardware."""

    name: str
    is_planned: bool
    hours: str
    hours_band: str
    usd: str
    usd_band: str
    usd_per_hour: str
    micro_batch: str
    remark: str


def plan_rows(report: Report) -> tuple[PlanRow, ...]:
    return tuple(_row(report, i) for i in range(len(report["plan_against_actual"])))


def _row(report: Report, i: int) -> PlanRow:
    row, at = report["plan_against_actual"][i], f"plan_against_actual[{i}]"
    show = SHOWN.get(row["unit"], f.plain)
    difference, low, high = row["difference_fraction"], row["plan_low"], row["plan_high"]
    inside = None
    if low is not None and high is not None and row["actual"] is not None:
        inside = low <= row["actual"] <= high
    return PlanRow(
        label=row["quantity"],
        plan=cell(report, f"{at}.plan", show, blank="not predicted"),
        band=_band(low, high, show),
        actual=cell(report, f"{at}.actual", show),
        difference=""
        if difference is None
        else f.signed_percent(difference)
        if difference
        else "0",
        is_inside=inside,
    )


def _band(low: float | None, high: float | None, show: Show) -> str:
    return "" if low is None or high is None else f"{show(low)} to {show(high)}"


def memory(report: Report) -> Memory | None:
    planned = look_up(report, "plan.memory")
    if planned is None or look_up(report, "training_report.hardware.gpu.name") is None:
        return None
    path = "training_report.hardware.memory_peak_reserved_bytes"
    actual = look_up(report, path)
    total = look_up(report, "training_report.hardware.gpu.memory_total_bytes")
    predicted = sum(planned[key] for key, _, _ in MEMORY_PARTS)
    scale = max(predicted, actual or 0, total or 0) or 1
    return Memory(
        parts=tuple(
            Part(label=label, colour=colour, seconds=planned[key], fraction=planned[key] / scale)
            for key, label, colour in MEMORY_PARTS
        ),
        predicted=f.size(predicted),
        actual=cell(report, path, f.size),
        total="" if total is None else f.size(total),
        actual_fraction=None if actual is None else actual / scale,
        total_fraction=None if total is None else total / scale,
    )


def options(report: Report) -> tuple[Option, ...]:
    planned, n = report["plan"]["hardware"], report["training_parameters"]["world_size"]
    return tuple(
        _option(item, is_planned=(item["name"], item["n_gpus"]) == (planned, n))
        for item in report["plan"]["options"]
    )


def _option(item: dict[str, Any], *, is_planned: bool) -> Option:
    def text(key: str, show: Show) -> str:
        return "unknown" if item[key] is None else show(item[key])

    recomputes = ", recomputing" if item["checkpoint_activations"] else ""
    size = item["micro_batch_size"]
    micro_batch = "" if size is None else f"{size}{recomputes}"
    return Option(
        name=f"{item['n_gpus']} \u00d7 {item['name']}",
        is_planned=is_planned,
        hours=text("hours", f.hours),
        hours_band=_band(item["hours_low"], item["hours_high"], f.hours),
        usd=text("usd", f.usd),
        usd_band=_band(item["usd_low"], item["usd_high"], f.usd),
        usd_per_hour=text("usd_per_hour", f.usd),
        micro_batch="does not fit" if item["fits"] is False else micro_batch,
        remark=item["remark"],
    )
