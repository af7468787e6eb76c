"""The parts of report.json on the plan, and every prediction beside its measurement."""

from typing import Any

from expertflow.report import run_records as r
from expertflow.report.derive import NO_PRICE
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Measured, Missing, explain, fill, or_missing

UNCALIBRATED = "the plan was not calibrated: it has no hours for this part"


def plan_section(inputs: ReportInputs) -> r.Plan:
    plan, cost = inputs.plan, inputs.plan.cost
    because = cost.reason
    is_unknown = cost.predicted_hours is None
    no_part = because if is_unknown else UNCALIBRATED
    no_memory = plan.predicted_peak_reason
    if plan.predicted_peak_bytes is not None:
        no_memory = "the plan does not say of what its peak consists"
    ends = ("_low", "", "_high")
    why = {
        "memory": no_memory,
        "next_micro_batch_peak_bytes": no_memory,
        "without_checkpointing_peak_bytes": no_memory
        if plan.gradient_checkpointing
        else "activations are kept",
        "mfu_fraction": because,
        "billing_minutes": "no billing step is configured",
        **dict.fromkeys(("step_hours", "save_hours", "eval_hours", "startup_hours"), no_part),
        **{f"predicted_hours{end}": because for end in ends},
        **{f"predicted_usd{end}": because if is_unknown else NO_PRICE for end in ends},
    }
    options: Any = [explain(option, {}, option.remark or because) for option in plan.options]
    return fill(
        r.Plan,
        plan,
        cost,
        why=why,
        memory_peak_bytes=or_missing(plan.predicted_peak_bytes, plan.predicted_peak_reason),
        useful_tokens_per_s=or_missing(_rate(plan.predicted_tokens, cost.step_hours), no_part),
        band=fill(r.PlanBand, cost, why=why),
        options=options,
    )


def _rate(n_tokens: int, hours: float | None) -> float | None:
    return n_tokens / hours / 3600 if hours is not None and hours > 0 else None


def speed_band(inputs: ReportInputs) -> tuple[float | None, float | None]:
    """Return the slowest and fastest speed of the band: all its width is put down to the steps."""
    cost, n_tokens = inputs.plan.cost, inputs.plan.predicted_tokens
    hours, step_hours = cost.predicted_hours, cost.step_hours
    low, high = cost.predicted_hours_low, cost.predicted_hours_high
    if hours is None or step_hours is None or low is None or high is None:
        return None, None
    slow, fast = (_rate(n_tokens, step_hours + end - hours) for end in (high, low))
    return (None, None) if fast is None else (slow, fast)


def plan_row(
    quantity: str,
    unit: Any,
    plan: Measured[float],
    actual: Measured[float],
    band: tuple[Measured[float] | None, Measured[float] | None] = (None, None),
) -> r.PlanRow:
    """Lay a prediction beside its measurement; a lack of either is that of the difference, too."""
    low, high = (None if isinstance(end, Missing) else end for end in band)
    if isinstance(plan, Missing) or isinstance(actual, Missing):
        difference: Measured[float] = plan if isinstance(plan, Missing) else actual
    else:
        difference = actual / plan - 1 if plan else Missing("the plan is zero")
    return r.PlanRow(
        quantity=quantity, unit=unit, plan=plan, plan_low=low, plan_high=high, actual=actual,
        difference_fraction=difference,
    )  # fmt: skip
