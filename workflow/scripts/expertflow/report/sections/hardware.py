"""The report's ``hardware`` section: the machine, and what the monitor saw of it."""

from typing import Any

from expertflow.core.records import to_json
from expertflow.report import derive
from expertflow.report.inputs import ReportInputs

# What the monitor's record holds under the same name, null where the machine cannot tell.
FROM_MONITOR = (
    "any_kernel_percent",
    "sm_active_percent",
    "tensor_active_percent",
    "power_w",
    "temperature_c",
    "memory_used_bytes",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "throttle_s",
    "throttle_source",
    "temperature_limits_c",
    "cpu_percent",
    "ram_used_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
    "energy_j",
    "energy_source",
    "energy_all_j",
    "power_all_w",
    "monitor_cpu_fraction",
)
NOTE = "reference only; a cool GPU is no fault"
# Bands that earlier set-ups worked by, as they stated them; nothing is judged by them.
REFERENCE_BANDS = tuple(
    {"quantity": name, "low": low, "high": high, "unit": unit, "system": system, "note": NOTE}
    for name, low, high, unit, system in (
        ("any_kernel_percent", 60.0, 85.0, "%", "one earlier set-up"),
        ("any_kernel_percent", 85.0, 95.0, "%", "another earlier set-up"),
        ("temperature_c", 70.0, 85.0, "\u00b0C", "one earlier set-up"),
        ("memory_used_bytes", 18e9, 22e9, "bytes", "an earlier set-up on a card of 24 GB"),
    )
)


def hardware_section(inputs: ReportInputs) -> dict[str, Any]:
    """Join the monitor's figures with what the trainer and the preflight know of the machine."""
    training, monitor = inputs.training, inputs.monitor
    return {
        "collection_interval_seconds": monitor.configured_interval_s,
        "collection_interval_effective_seconds": monitor.effective_interval_s,
        "samples": monitor.n_samples,
        "watched_s": monitor.wall_s,
        "series_path": training.gpu_path,
        "device": training.device,
        "n_gpus": 0 if derive.on_cpu(training) else training.world_size,
        "n_gpus_visible": monitor.n_gpus,
        "threads": training.n_threads,
        "machine": inputs.preflight.get("machine"),
        "gpu": _gpu(inputs),
        **{name: to_json(getattr(monitor, name)) for name in FROM_MONITOR},
        "memory_peak_allocated_bytes": training.peak_memory_allocated_bytes,
        "memory_peak_reserved_bytes": training.peak_memory_reserved_bytes,
        "memory_spilled_bytes": derive.memory_spilled(inputs).value,
        "host_memory_peak_bytes": training.peak_host_rss_bytes,
        "lost_readings": dict(monitor.n_lost_readings),
        "monitor_remarks": list(monitor.remarks),
        "reference_bands": [dict(band) for band in REFERENCE_BANDS],
        "assessment": list(monitor.assessment),
    }


def _gpu(inputs: ReportInputs) -> dict[str, Any]:
    monitor, training = inputs.monitor, inputs.training
    facts, peak = derive.facts_of_card(inputs.plan, training), derive.peak(inputs.plan, training)
    return {
        "name": training.gpu_name,
        "driver": monitor.driver,
        "compute_capability": facts.compute_capability if facts else None,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_bf16_flops_per_s": peak.flops_per_s if training.precision == "bf16" else None,
        "peak_source": peak.source,
        "sources": dict(facts.sources) if facts else None,
        "memory_total_bytes": monitor.memory_total_bytes,
        "power_limit_w": monitor.power_limit_w,
    }
