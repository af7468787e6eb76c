"""Build the parts of report.json about training, hardware, and time, compared with the plan."""

from typing import Any

from expertflow.report import derive
from expertflow.report import run_records as r
from expertflow.report.derive import NO_PRICE
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Measured, Missing, convert_value, explain, fill, or_missing
from expertflow.train.records import TrainingRecord

STEPS_ALONE = "the plan was not calibrated: its hours are for the steps alone"
NOT_RECORDED = "the monitor did not record it"
# Bands that earlier setups used, as they stated them; for reference only.
REFERENCE_BANDS = tuple(
    r.ReferenceBand(
        quantity=name, low=low, high=high, unit=unit, system=system,
        note="reference only; a cool GPU is not a fault",
    )
    for name, low, high, unit, system in (
        ("any_kernel_percent", 60.0, 85.0, "%", "one earlier setup"),
        ("any_kernel_percent", 85.0, 95.0, "%", "another earlier setup"),
        ("temperature_c", 70.0, 85.0, "\u00b0C", "one earlier setup"),
        ("memory_used_bytes", 18e9, 22e9, "bytes", "an earlier setup on a 24 GB card"),
    )
)  # fmt: skip


def build_training(inputs: ReportInputs) -> r.TrainingOutcome:
    training = inputs.training
    no_loss = {"eval_loss": "no evaluation was run in this epoch"}
    return fill(
        r.TrainingOutcome,
        training,
        why={
            "stopped_early_at_step": "the run was not stopped early",
            "sampled_steps": derive.why_untold(training, "sampled_steps"),
        },
        planned_steps=inputs.plan.n_steps,
        epoch_summaries=tuple(explain(epoch, no_loss) for epoch in training.epoch_summaries),
    )


def build_hardware(inputs: ReportInputs) -> r.Hardware:
    training, monitor = inputs.training, inputs.monitor
    return fill(
        r.Hardware,
        monitor,
        training,
        why=monitor.unavailable,
        default=NOT_RECORDED,
        collection_interval_seconds=or_missing(
            monitor.configured_interval_s, "automatic: the monitor chose its own interval"
        ),
        collection_interval_effective_seconds=read_monitor(inputs, "effective_interval_s"),
        memory_peak_allocated_bytes=_read_peak(training, "peak_memory_allocated_bytes"),
        memory_peak_reserved_bytes=_read_peak(training, "peak_memory_reserved_bytes"),
        host_memory_peak_bytes=training.peak_host_rss_bytes,
        monitor_remarks=monitor.remarks,
        # One process per card.
        n_gpus=0 if training.device == "cpu" else training.world_size,
        machine=or_missing(
            inputs.preflight.get("machine"),
            "the preflight of this run did not describe the machine",
        ),
        gpu=_gpu(inputs),
        memory_spilled_bytes=derive.memory_spilled(inputs),
        reference_bands=REFERENCE_BANDS,
    )


def _read_peak(training: TrainingRecord, name: str) -> Measured[int]:
    return or_missing(getattr(training, name), derive.why_untold(training, name))


def read_monitor(inputs: ReportInputs, name: str) -> Measured[Any]:
    why = inputs.monitor.unavailable.get(name) or NOT_RECORDED
    return or_missing(getattr(inputs.monitor, name), why)


def _gpu(inputs: ReportInputs) -> r.Gpu:
    training, peak = inputs.training, derive.peak(inputs.plan, inputs.training)
    unnamed = "the driver did not report the card's name"
    if training.device == "cpu":
        unnamed = "this run was on the CPU"
    return fill(
        r.Gpu,
        inputs.monitor,
        why=inputs.monitor.unavailable,
        default=NOT_RECORDED,
        name=or_missing(training.gpu_name, unnamed),
        peak_flops_per_s=peak if isinstance(peak, Missing) else peak.flops_per_s,
        peak_source=peak if isinstance(peak, Missing) else peak.source,
    )


def build_plan(inputs: ReportInputs) -> r.PlanForecast:
    plan, cost = inputs.plan, inputs.plan.cost
    because = cost.reason
    is_unknown = cost.predicted_hours is None
    # It explains how memory was predicted, or why not.
    no_memory = plan.predicted_peak_reason
    if plan.predicted_peak_bytes is not None:
        no_memory = "the plan does not split its peak into parts"
    ends = ("_low", "", "_high")
    why = {
        "memory": no_memory,
        "next_micro_batch_peak_bytes": no_memory,
        "without_checkpointing_peak_bytes": no_memory
        if plan.gradient_checkpointing
        else "activations are kept",
        "billing_minutes": "no billing step is configured",
        **{f"predicted_hours{end}": because for end in ends},
        **{f"predicted_usd{end}": because if is_unknown else NO_PRICE for end in ends},
    }
    return fill(
        r.PlanForecast,
        plan,
        cost,
        why=why,
        memory_peak_bytes=or_missing(plan.predicted_peak_bytes, plan.predicted_peak_reason),
        useful_tokens_per_s=or_missing(_rate(plan.predicted_tokens, cost.step_hours), because),
        band=fill(r.PlanBand, cost, why=why),
        options=tuple(explain(option, {}, option.remark or because) for option in plan.options),
    )


def _rate(n_tokens: int, hours: float | None) -> float | None:
    return n_tokens / hours / 3600 if hours is not None and hours > 0 else None


def estimate_speed_band(inputs: ReportInputs) -> tuple[float | None, float | None]:
    """Return the slowest and fastest speed, attributing the plan's full band to the steps."""
    cost, n_tokens = inputs.plan.cost, inputs.plan.predicted_tokens
    hours, step_hours = cost.predicted_hours, cost.step_hours
    low, high = cost.predicted_hours_low, cost.predicted_hours_high
    if hours is None or step_hours is None or low is None or high is None:
        return None, None
    # 10 h (8 to 13), 9 of them steps -> 7 to 12 h of steps; fewer hours are faster.
    slow, fast = (_rate(n_tokens, step_hours + end - hours) for end in (high, low))
    return (None, None) if fast is None else (slow, fast)


def plan_row(
    quantity: str,
    unit: Any,
    plan: Measured[float],
    actual: Measured[float],
    band: tuple[Measured[float] | None, Measured[float] | None] = (None, None),
    unlike: str | None = None,
) -> r.PlanRow:
    """Compare a prediction with its measurement; if either is missing, so is the difference.

    ``unlike`` says why the two cannot be compared.
    """
    low, high = (None if isinstance(end, Missing) else end for end in band)

    def compare(planned: float, measured: float) -> Measured[float]:
        if unlike is not None:
            return Missing(unlike)
        return measured / planned - 1 if planned else Missing("the plan is zero")

    return r.PlanRow(
        quantity=quantity, unit=unit, plan=plan, plan_low=low, plan_high=high, actual=actual,
        # Nested: if both figures are missing, the plan's reason is used.
        difference_fraction=convert_value(
            plan, lambda plan: convert_value(actual, lambda it: compare(plan, it))
        ),
    )  # fmt: skip
