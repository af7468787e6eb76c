"""The parts of report.json that say what training and the monitor saw."""

from typing import Any

from expertflow.report import derive
from expertflow.report import run_records as r
from expertflow.report.derive import facts_of_card
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Measured, Missing, explain, fill, or_missing

NOT_RECORDED = "the monitor did not record it"
# Bands that earlier set-ups worked by, as they stated them; nothing is judged by them.
REFERENCE_BANDS = tuple(
    r.ReferenceBand(
        quantity=name, low=low, high=high, unit=unit, system=system,
        note="reference only; a cool GPU is no fault",
    )
    for name, low, high, unit, system in (
        ("any_kernel_percent", 60.0, 85.0, "%", "one earlier set-up"),
        ("any_kernel_percent", 85.0, 95.0, "%", "another earlier set-up"),
        ("temperature_c", 70.0, 85.0, "\u00b0C", "one earlier set-up"),
        ("memory_used_bytes", 18e9, 22e9, "bytes", "an earlier set-up on a card of 24 GB"),
    )
)  # fmt: skip


def training_section(inputs: ReportInputs) -> r.Training:
    training = inputs.training
    no_loss = {"eval_loss": "no evaluation fell into this epoch"}
    epochs: Any = [explain(epoch, no_loss) for epoch in training.epoch_summaries]
    return fill(
        r.Training,
        training,
        why={
            "stopped_early_at_step": "the run was not stopped early",
            "sampled_steps": _why_untold(inputs, "sampled_steps"),
        },
        planned_steps=inputs.plan.n_steps,
        n_candidates=len(training.candidates),
        epoch_summaries=epochs,
    )


def _why_untold(inputs: ReportInputs, name: str) -> str:
    said = inputs.training.unavailable
    return said.get(name) or said.get(f"time.{name}") or "the trainer did not record it"


def hardware_section(inputs: ReportInputs) -> r.Hardware:
    training, monitor = inputs.training, inputs.monitor
    allocated, reserved = "peak_memory_allocated_bytes", "peak_memory_reserved_bytes"
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
        memory_peak_allocated_bytes=or_missing(
            training.peak_memory_allocated_bytes, _why_untold(inputs, allocated)
        ),
        memory_peak_reserved_bytes=or_missing(
            training.peak_memory_reserved_bytes, _why_untold(inputs, reserved)
        ),
        host_memory_peak_bytes=training.peak_host_rss_bytes,
        monitor_remarks=monitor.remarks,
        n_gpus=0 if derive.on_cpu(training) else training.world_size,
        machine=or_missing(
            inputs.preflight.get("machine"),
            "the preflight of this run did not describe the machine",
        ),
        gpu=_gpu(inputs),
        memory_spilled_bytes=derive.memory_spilled(inputs),
        reference_bands=REFERENCE_BANDS,
    )


def read_monitor(inputs: ReportInputs, name: str) -> Measured[Any]:
    why = inputs.monitor.unavailable.get(name) or NOT_RECORDED
    return or_missing(getattr(inputs.monitor, name), why)


def _gpu(inputs: ReportInputs) -> r.Gpu:
    training, facts = inputs.training, facts_of_card(inputs.plan, inputs.training)
    peak = derive.peak(inputs.plan, training)
    other = "the card that ran is not the one that the plan describes"
    no_card = "this run was on the CPU" if derive.on_cpu(training) else other
    unnamed = no_card if derive.on_cpu(training) else "the driver did not tell the card's name"
    in_table = "config/hardware/gpus.yaml does not have it for this card"
    flops = peak if isinstance(peak, Missing) else peak.flops_per_s
    is_bf16 = isinstance(peak, Missing) or training.precision == "bf16"
    return fill(
        r.Gpu,
        inputs.monitor,
        why=inputs.monitor.unavailable,
        default=NOT_RECORDED,
        name=or_missing(training.gpu_name, unnamed),
        compute_capability=or_missing(
            facts.compute_capability if facts else None, in_table if facts else no_card
        ),
        peak_flops_per_s=flops,
        peak_bf16_flops_per_s=flops if is_bf16 else Missing(f"the run used {training.precision}"),
        peak_source=peak if isinstance(peak, Missing) else peak.source,
        sources=facts.sources if facts else Missing(no_card),
    )


def time_section(inputs: ReportInputs) -> dict[str, Any]:
    times = derive.split_time(inputs.training)
    idle, source = times.gpu_idle_source, times.split_source
    parts = ("h2d_s", "forward_s", "backward_s", "optimizer_s")
    reasons = {part: _why_untold(inputs, part) for part in parts}
    if isinstance(source, Missing) and not derive.on_cpu(inputs.training):
        reasons = dict.fromkeys(parts, source.reason)
    if isinstance(idle, Missing):
        reasons["gpu_idle_s"] = idle.reason
    return {**explain(times.spent, reasons), "split_source": source, "gpu_idle_source": idle}
