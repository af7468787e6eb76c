"""The report's ``plan`` section, and every prediction beside the measurement that answers it."""

from typing import Any

from expertflow.core.records import to_json
from expertflow.plan.records import TrainPlan
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]
SECONDS = 3600.0
# Every prediction, and the path of the measurement that answers it.
COMPARED = {
    "Optimiser steps": ("plan.steps", "training_report.training.steps"),
    "Useful tokens": ("plan.trained_tokens", "data.trained_tokens"),
    "Useful tokens a second": ("plan.useful_tokens_per_s", "throughput.useful_tokens_per_s"),
    "Wall time": ("plan.hours", "cost.hours"),
    "Cost": ("plan.usd", "cost.billed_usd"),
    "Peak device memory": (
        "plan.memory_peak_bytes",
        "training_report.hardware.memory_peak_reserved_bytes",
    ),
}
UNITS = dict(zip(COMPARED, ("steps", "tokens", "tokens/s", "h", "usd", "bytes"), strict=True))


def plan_section(inputs: ReportInputs) -> dict[str, Any]:
    """Say what was predicted before the run, and why every setting has its value."""
    plan, cost = inputs.plan, inputs.plan.cost
    return {
        "hardware": plan.hardware,
        "steps": plan.n_steps,
        "micro_batch_size": plan.batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "trained_tokens": plan.predicted_tokens,
        "useful_tokens_per_s": useful_tokens_per_s(plan),
        "memory_peak_bytes": plan.predicted_peak_bytes,
        "memory": to_json(plan.memory),
        "next_micro_batch_peak_bytes": plan.next_micro_batch_peak_bytes,
        "without_checkpointing_peak_bytes": plan.without_checkpointing_peak_bytes,
        "memory_reason": plan.predicted_peak_reason,
        "calibrated": cost.calibrated,
        "mfu_fraction": cost.mfu_fraction,
        "hours": cost.predicted_hours,
        "step_hours": cost.step_hours,
        "save_hours": cost.save_hours,
        "eval_hours": cost.eval_hours,
        "startup_hours": cost.startup_hours,
        "usd": cost.predicted_usd,
        "billing_minutes": cost.billing_minutes,
        "band": {
            "hours_low": cost.predicted_hours_low,
            "hours_high": cost.predicted_hours_high,
            "usd_low": cost.predicted_usd_low,
            "usd_high": cost.predicted_usd_high,
        },
        "cost_reason": cost.reason,
        "options": to_json(plan.options),
        "claims": to_json(plan.claims),
        "reasons": to_json(plan.reasons),
    }


def useful_tokens_per_s(plan: TrainPlan) -> float | None:
    """Give the speed that the plan's hours of stepping imply."""
    return _rate(plan.predicted_tokens, plan.cost.step_hours)


def plan_against_actual(report: Report) -> list[dict[str, Any]]:
    """Lay the plan beside the run, quantity by quantity, with the plan's band where it has one."""
    band = report["plan"]["band"]
    bands = {
        "Useful tokens a second": _speed_band(report["plan"]),
        "Wall time": (band["hours_low"], band["hours_high"]),
        "Cost": (band["usd_low"], band["usd_high"]),
    }
    return [
        _row(quantity, _at(report, plan), _at(report, actual), bands.get(quantity, (None, None)))
        for quantity, (plan, actual) in COMPARED.items()
    ]


def _at(report: Report, path: str) -> float | None:
    value: Any = report
    for key in path.split("."):
        value = value[key]
    number: float | None = value
    return number


def _row(
    quantity: str,
    plan: float | None,
    actual: float | None,
    band: tuple[float | None, float | None],
) -> dict[str, Any]:
    difference = actual / plan - 1 if plan and actual is not None else None
    return {
        "quantity": quantity,
        "unit": UNITS[quantity],
        "plan": plan,
        "plan_low": band[0],
        "plan_high": band[1],
        "actual": actual,
        "difference_fraction": difference,
    }


def _speed_band(plan: Report) -> tuple[float | None, float | None]:
    """Give the slowest and fastest speed of the band: all of its width is put down to the steps."""
    hours, step_hours, band = plan["hours"], plan["step_hours"], plan["band"]
    if None in (hours, step_hours, band["hours_low"], band["hours_high"]):
        return None, None
    slow = _rate(plan["trained_tokens"], step_hours + band["hours_high"] - hours)
    fast = _rate(plan["trained_tokens"], step_hours + band["hours_low"] - hours)
    return (None, None) if fast is None else (slow, fast)


def _rate(n_tokens: int, hours: float | None) -> float | None:
    return n_tokens / hours / SECONDS if hours is not None and hours > 0 else None
