"""The parts of report.json that say what training and the monitor saw."""

from typing import Any, TypeVar

from expertflow.report import derive
from expertflow.report import run_records as r
from expertflow.report.derive import facts_of_card
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Measured, Missing, explain, fill, or_missing

T = TypeVar("T")
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
        steps=training.n_steps,
        planned_steps=inputs.plan.n_steps,
        stopped_early_at_step=or_missing(
            training.stopped_early_at_step, "the run was not stopped early"
        ),
        n_candidates=len(training.candidates),
        epochs=training.n_epochs,
        sessions=training.n_sessions,
        saves=training.n_saves,
        sampled_steps=_of_trainer(inputs, training.sampled_steps, "sampled_steps"),
        epoch_summaries=epochs,
        series_path=training.steps_path,
    )


def _of_trainer(inputs: ReportInputs, value: T | None, name: str) -> Measured[T]:
    said = inputs.training.unavailable
    why = said.get(name) or said.get(f"time.{name}") or "the trainer did not record it"
    return or_missing(value, why)


def hardware_section(inputs: ReportInputs) -> r.Hardware:
    training, monitor = inputs.training, inputs.monitor
    # A field of the monitor's record has its name here, but for these.
    renamed = {
        "collection_interval_effective_seconds": "effective_interval_s",
        "watched_s": "wall_s",
        "n_gpus_visible": "n_gpus",
    }
    given: dict[str, Any] = {
        "collection_interval_seconds": or_missing(
            monitor.configured_interval_s, "automatic: the monitor chose its own interval"
        ),
        "samples": monitor.n_samples,
        "series_path": training.gpu_path,
        "device": training.device,
        "n_gpus": 0 if derive.on_cpu(training) else training.world_size,
        "threads": training.n_threads,
        "machine": or_missing(
            inputs.preflight.get("machine"),
            "the preflight of this run did not describe the machine",
        ),
        "gpu": _gpu(inputs),
        "memory_peak_allocated_bytes": _of_trainer(
            inputs, training.peak_memory_allocated_bytes, "peak_memory_allocated_bytes"
        ),
        "memory_peak_reserved_bytes": _of_trainer(
            inputs, training.peak_memory_reserved_bytes, "peak_memory_reserved_bytes"
        ),
        "memory_spilled_bytes": derive.memory_spilled(inputs),
        "host_memory_peak_bytes": training.peak_host_rss_bytes,
        "lost_readings": monitor.n_lost_readings,
        "monitor_remarks": monitor.remarks,
        "reference_bands": REFERENCE_BANDS,
        "assessment": monitor.assessment,
    }
    for name in r.Hardware.__struct_fields__:
        if name not in given:
            given[name] = read_monitor(inputs, renamed.get(name, name))
    return r.Hardware(**given)


def read_monitor(inputs: ReportInputs, name: str) -> Measured[Any]:
    """Return a figure of the monitor, or what it says of its lack."""
    why = inputs.monitor.unavailable.get(name) or "the monitor did not record it"
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
    return r.Gpu(
        name=or_missing(training.gpu_name, unnamed),
        driver=read_monitor(inputs, "driver"),
        compute_capability=or_missing(
            facts.compute_capability if facts else None, in_table if facts else no_card
        ),
        peak_flops_per_s=flops,
        peak_bf16_flops_per_s=flops if is_bf16 else Missing(f"the run used {training.precision}"),
        peak_source=peak if isinstance(peak, Missing) else peak.source,
        sources=facts.sources if facts else Missing(no_card),
        memory_total_bytes=read_monitor(inputs, "memory_total_bytes"),
        power_limit_w=read_monitor(inputs, "power_limit_w"),
    )


def time_section(inputs: ReportInputs) -> dict[str, Any]:
    times, said = derive.split_time(inputs.training), inputs.training.unavailable
    idle, source = times.gpu_idle_source, times.split_source
    parts = ("h2d_s", "forward_s", "backward_s", "optimizer_s")
    reasons = {
        part: said.get(part) or said.get(f"time.{part}") or "the trainer did not record it"
        for part in parts
    }
    if isinstance(source, Missing) and not derive.on_cpu(inputs.training):
        reasons = dict.fromkeys(parts, source.reason)
    if isinstance(idle, Missing):
        reasons["gpu_idle_s"] = idle.reason
    return {
        **explain(times.spent, reasons),
        "split_source": source,
        "gpu_idle_source": idle,
    }
