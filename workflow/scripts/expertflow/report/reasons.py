"""Say of every null in a report why it is null: an empty place without a reason reads like a fault.

Reasons are looked up by dotted path. List indices are left out of the keys here (``sources[].x``)
and filled in by ``explain`` (``sources[2].x``).
"""

import re
from collections.abc import Iterator
from typing import Any

from expertflow.report import derive
from expertflow.report.inputs import ReportInputs

HARDWARE = "training_report.hardware"

# report path -> field of the training record, under which the trainer notes why it is null
FROM_TRAINING = {
    **{f"time.{part}_s": f"{part}_s" for part in ("h2d", "forward", "backward", "optimizer")},
    "time.gpu_idle_s": "gpu_idle_s",
    "training_report.training.sampled_steps": "sampled_steps",
    f"{HARDWARE}.memory_peak_allocated_bytes": "peak_memory_allocated_bytes",
    f"{HARDWARE}.memory_peak_reserved_bytes": "peak_memory_reserved_bytes",
}

# the same for the record of the hardware monitor
FROM_MONITOR = {
    f"{HARDWARE}.collection_interval_effective_seconds": "effective_interval_s",
    f"{HARDWARE}.any_kernel_percent": "any_kernel_percent",
    f"{HARDWARE}.power_w": "power_w",
    f"{HARDWARE}.temperature_c": "temperature_c",
    f"{HARDWARE}.memory_used_bytes": "memory_used_bytes",
    f"{HARDWARE}.cpu_percent": "cpu_percent",
    f"{HARDWARE}.ram_used_bytes": "ram_used_bytes",
    f"{HARDWARE}.energy_j": "energy_j",
    f"{HARDWARE}.gpu.driver": "driver",
    f"{HARDWARE}.gpu.memory_total_bytes": "memory_total_bytes",
    f"{HARDWARE}.gpu.power_limit_w": "power_limit_w",
    "provenance.driver": "driver",
}

ALWAYS = {
    f"{HARDWARE}.tensor_active_percent": "the monitor does not read profiling counters",
    f"{HARDWARE}.memory_spilled_bytes": "the monitor does not read memory spilled to the host",
    f"{HARDWARE}.throttle_s": "the monitor does not read clock-event reasons",
    f"{HARDWARE}.energy_source": "no sample holds a reading of an energy counter",
    f"{HARDWARE}.gpu.name": "this run was on the CPU",
    "training_report.training.stopped_early_at_step": "the run was not stopped early",
    "training_report.training.epoch_summaries[].eval_loss": "no evaluation fell into this epoch",
    "cost.rate_as_of": "the price has no date",
    "export.merged_into": "no adapter was trained",
    "model.revision": "only models from a hub have a revision",
    "model.licence": "the model states no licence",
    "model.lora": "the method trains all weights",
    "data.padding_fraction": "no token was trained",
    "data.fill_fraction": "no rows were packed",
    "data.truncated_fraction": "no rows were packed",
    "data.sources[].revision": "the source has no revision; its sha256 pins it",
    "data.sources[].licence": "the manifest states no licence for this source",
    "data.sources[].n_records": "the records of this source were not counted",
    "evaluation.delta.ci95": "a side has no interval",
    "evaluation.samples[].before": "no text was generated",
    "evaluation.samples[].after": "no text was generated",
    "evaluation.samples[].kind_before": "the text was not judged",
    "evaluation.samples[].kind_after": "the text was not judged",
    "provenance.git": "the workflow is not in a git checkout",
    "provenance.lockfile_sha256": "not handed to the report",
    "provenance.command": "not handed to the report",
    "provenance.host_hash": "not handed to the report",
    "provenance.torch": "the trainer did not note its version",
}


def explain(report: dict[str, Any], inputs: ReportInputs) -> dict[str, str]:
    """Map the path of every null leaf to its reason. A null without one is left out."""
    known = _known(inputs)
    found = ((path, known.get(re.sub(r"\[\d+\]", "[]", path))) for path in null_paths(report))
    return {path: reason for path, reason in found if reason}


def null_paths(value: Any, path: str = "") -> Iterator[str]:
    """Walk JSON values in order and yield the dotted path of each null.

    >>> list(null_paths({"a": {"b": None}, "c": [1, None]}))
    ['a.b', 'c[1]']
    """
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from null_paths(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from null_paths(item, f"{path}[{index}]")


def _known(inputs: ReportInputs) -> dict[str, str]:
    return {
        **ALWAYS,
        **_from_record(FROM_TRAINING, inputs.training.unavailable, "the trainer"),
        **_from_record(FROM_MONITOR, inputs.monitor.unavailable, "the monitor"),
        **_derived(inputs),
        **_planned(inputs),
        **_scored(inputs),
    }


def _from_record(fields: dict[str, str], unavailable: dict[str, str], who: str) -> dict[str, str]:
    default = f"{who} did not record it"
    return {
        path: unavailable.get(field) or unavailable.get(f"time.{field}") or default
        for path, field in fields.items()
    }


def _derived(inputs: ReportInputs) -> dict[str, str]:
    plan, training = inputs.plan, inputs.training
    peak = derive.peak(plan, training).reason
    no_bf16 = f"the run used {training.precision}" if training.precision != "bf16" else None
    reasons = {
        "throughput.useful_tokens_per_s": derive.tokens_per_s(training).reason,
        "throughput.mfu_fraction": derive.utilisation(inputs, plan.flops_per_token_model).reason,
        "throughput.hfu_fraction": derive.utilisation(inputs, plan.flops_per_token_hardware).reason,
        "throughput.goodput_fraction": derive.goodput(training.time).reason,
        "cost.usd": derive.cost_usd(inputs).reason,
        "cost.usd_per_hour": derive.cost_usd(inputs).reason,
        "cost.usd_per_million_tokens": derive.cost_usd_per_million_tokens(inputs).reason,
        f"{HARDWARE}.gpu.peak_flops_per_s": peak,
        f"{HARDWARE}.gpu.peak_bf16_flops_per_s": peak or no_bf16,
        f"{HARDWARE}.gpu.peak_source": peak,
    }
    if inputs.plan.cost.price_usd_per_hour is None:
        reasons["cost.rate_as_of"] = reasons["cost.usd"]
    return {path: reason for path, reason in reasons.items() if reason}


def _planned(inputs: ReportInputs) -> dict[str, str]:
    because, staging = inputs.plan.cost.reason, inputs.staging.reason
    band = ("hours_low", "hours_high", "usd_low", "usd_high")
    return {
        "plan.hours": because,
        "plan.usd": because,
        **{f"plan.band.{key}": because for key in band},
        "plan.memory_peak_bytes": inputs.plan.predicted_peak_reason,
        **{f"staging.{key}": staging for key in ("target", "n_bytes_copied", "copy_bytes_per_s")},
    }


def _scored(inputs: ReportInputs) -> dict[str, str]:
    record = inputs.evaluation
    no_metric = f"task {record.task} has no metric beyond the held-out loss"
    fields = ("value_fraction", "ci95", "n_examples", "n_correct", "n_by_kind", "generation_s")
    reasons = {"evaluation.metric": no_metric}
    for name, side in (("before", record.before), ("after", record.after)):
        because = side.score.reason if side.score else no_metric
        reasons |= {f"evaluation.{name}.{key}": because or "not recorded" for key in fields}
    if record.before.score is None or record.after.score is None:
        because = no_metric
    else:
        because = record.after.score.reason or record.before.score.reason or "not recorded"
    reasons["evaluation.delta.value_fraction"] = because
    reasons["evaluation.delta.ci95"] = because
    return reasons
