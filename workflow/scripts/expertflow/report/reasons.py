"""Say of every null in a report why it is null: an empty place without a reason reads like a fault.

Reasons are looked up by dotted path. List indices are left out of the keys here (``sources[].x``)
and filled in by ``explain`` (``sources[2].x``).
"""

import re
from collections.abc import Iterator
from typing import Any

from expertflow.report import derive
from expertflow.report.evaluation_reasons import evaluation_reasons
from expertflow.report.finding import NO_PRICE
from expertflow.report.inputs import ReportInputs
from expertflow.report.sections import hardware as hardware_section
from expertflow.report.sections.plan import COMPARED
from expertflow.report.sections.profile import profile_reasons
from expertflow.report.sections.staging import staging_reasons
from expertflow.report.sections.time import THROWN_AWAY, split
from expertflow.train.records import NOT_ON_CPU

HARDWARE = "training_report.hardware"
UNCALIBRATED = "the plan was not calibrated: it has no hours for this part"
OPTION_FIGURES = (
    "fits", "micro_batch_size", "checkpoint_activations", "hours", "hours_low", "hours_high",
    "usd_per_hour", "price_as_of", "usd", "usd_low", "usd_high",
)  # fmt: skip

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
    **{f"{HARDWARE}.{name}": name for name in hardware_section.FROM_MONITOR},
    f"{HARDWARE}.collection_interval_effective_seconds": "effective_interval_s",
    f"{HARDWARE}.watched_s": "wall_s",
    f"{HARDWARE}.n_gpus_visible": "n_gpus",
    f"{HARDWARE}.gpu.driver": "driver",
    f"{HARDWARE}.gpu.memory_total_bytes": "memory_total_bytes",
    f"{HARDWARE}.gpu.power_limit_w": "power_limit_w",
    "provenance.driver": "driver",
}

ALWAYS = {
    f"{HARDWARE}.machine": "the preflight of this run did not describe the machine",
    f"{HARDWARE}.collection_interval_seconds": "automatic: the monitor chose its own interval",
    "training_report.training.stopped_early_at_step": "the run was not stopped early",
    "training_parameters.patience": "the run was not to stop early",
    "training_report.training.epoch_summaries[].eval_loss": "no evaluation fell into this epoch",
    "cost.rate_as_of": "the price has no date",
    "plan.billing_minutes": "no billing step is configured",
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
    "provenance.git": "the workflow is not in a git checkout",
    "provenance.lockfile_sha256": "not handed to the report",
    "provenance.command": "not handed to the report",
    "provenance.host_hash": "not handed to the report",
    "provenance.torch": "the trainer did not note its version",
}


def explain(report: dict[str, Any], inputs: ReportInputs) -> dict[str, str]:
    """Map the path of every null leaf to its reason. A null without one is left out."""
    known = _known(inputs)
    known |= _compared(report, known) | staging_reasons(report["staging"])
    found = (
        (path, known.get(path) or known.get(re.sub(r"\[\d+\]", "[]", path)))
        for path in null_paths(report)
    )
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
        **evaluation_reasons(inputs.evaluation),
        **profile_reasons(inputs),
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
    speed = derive.tokens_per_s(training).reason
    target_usd = derive.usd_per_million(inputs, training.n_target_tokens).reason
    reasons = {
        "throughput.useful_tokens_per_s": speed,
        "throughput.target_tokens_per_s": speed,
        "throughput.steps_per_s": speed,
        "throughput.mfu_fraction": derive.utilisation(inputs, plan.flops_per_token_model).reason,
        "throughput.hfu_fraction": derive.utilisation(inputs, plan.flops_per_token_hardware).reason,
        "throughput.goodput_fraction": derive.goodput(training.time).reason,
        "cost.usd": derive.cost_usd(inputs).reason,
        "cost.billed_usd": derive.billed_usd(inputs).reason,
        "cost.usd_per_hour": derive.cost_usd(inputs).reason,
        "cost.usd_per_million_tokens": derive.usd_per_million(inputs, training.n_tokens).reason,
        "cost.usd_per_million_target_tokens": target_usd,
        "cost.energy_kwh": derive.energy_kwh(inputs).reason,
        f"{HARDWARE}.memory_spilled_bytes": derive.memory_spilled(inputs).reason,
        **_timed(inputs),
        **_of_card(inputs, peak),
    }
    if inputs.plan.cost.price_usd_per_hour is None:
        reasons["cost.rate_as_of"] = reasons["cost.usd"]
    return {path: reason for path, reason in reasons.items() if reason}


def _timed(inputs: ReportInputs) -> dict[str, str | None]:
    """Explain a time that is not split: on a CPU the trainer said why, on a GPU no step was."""
    if derive.on_cpu(inputs.training):
        why = "the trainer did not time the parts of a step"
        idle = inputs.training.unavailable.get("time.gpu_idle_s", NOT_ON_CPU)
        return {"time.split_source": why, "time.gpu_idle_s": idle, "time.gpu_idle_source": idle}
    times = split(inputs.training)
    if times.split_source is not None:
        if times.gpu_idle_source is not None:
            return {}
        return {"time.gpu_idle_s": THROWN_AWAY, "time.gpu_idle_source": THROWN_AWAY}
    why = inputs.training.unavailable.get("sampled_steps", "no step was timed on the device")
    parts = ("h2d_s", "forward_s", "backward_s", "optimizer_s", "split_source", "gpu_idle_s")
    return {f"time.{part}": why for part in (*parts, "gpu_idle_source")}


def _of_card(inputs: ReportInputs, peak: str | None) -> dict[str, str | None]:
    plan, training = inputs.plan, inputs.training
    no_card = "this run was on the CPU"
    if not derive.on_cpu(training):
        no_card = "the card that ran is not the one that the plan describes"
    unnamed = no_card if derive.on_cpu(training) else "the driver did not tell the card's name"
    known = derive.facts_of_card(plan, training) is not None
    table = "config/hardware/gpus.yaml does not have it for this card" if known else no_card
    no_bf16 = f"the run used {training.precision}" if training.precision != "bf16" else None
    return {
        f"{HARDWARE}.gpu.name": unnamed,
        f"{HARDWARE}.gpu.compute_capability": table,
        f"{HARDWARE}.gpu.sources": no_card,
        f"{HARDWARE}.gpu.peak_flops_per_s": peak,
        f"{HARDWARE}.gpu.peak_bf16_flops_per_s": peak or no_bf16,
        f"{HARDWARE}.gpu.peak_source": peak,
    }


def _planned(inputs: ReportInputs) -> dict[str, str]:
    plan, cost = inputs.plan, inputs.plan.cost
    because = cost.reason
    no_parts = because if cost.predicted_hours is None else UNCALIBRATED
    no_memory = plan.predicted_peak_reason
    if plan.predicted_peak_bytes is not None:
        no_memory = "the plan does not say of what its peak consists"
    kept = "activations are kept" if not plan.gradient_checkpointing else no_memory
    parts = ("step_hours", "save_hours", "eval_hours", "startup_hours", "useful_tokens_per_s")
    return {
        "plan.hours": because,
        "plan.usd": NO_PRICE if cost.predicted_hours is not None else because,
        "plan.mfu_fraction": because,
        **{f"plan.{key}": no_parts for key in parts},
        **{f"plan.band.hours_{end}": because for end in ("low", "high")},
        **{f"plan.band.usd_{end}": NO_PRICE if cost.predicted_hours else because
           for end in ("low", "high")},
        "plan.memory_peak_bytes": plan.predicted_peak_reason,
        "plan.memory": no_memory,
        "plan.next_micro_batch_peak_bytes": no_memory,
        "plan.without_checkpointing_peak_bytes": kept,
        **{f"plan.options[{i}].{key}": option.remark or because
           for i, option in enumerate(plan.options) for key in OPTION_FIGURES},
    }  # fmt: skip


def _compared(report: dict[str, Any], said: dict[str, str]) -> dict[str, str]:
    """Explain the nulls of plan against actual by those of the values that they repeat."""
    reasons: dict[str, str] = {}
    for index, row in enumerate(report["plan_against_actual"]):
        place, (plan, actual) = f"plan_against_actual[{index}]", COMPARED[row["quantity"]]
        reasons |= {f"{place}.plan": said.get(plan, ""), f"{place}.actual": said.get(actual, "")}
        first = plan if row["plan"] is None else actual
        reasons[f"{place}.difference_fraction"] = said.get(first, "the plan is zero")
    return reasons
