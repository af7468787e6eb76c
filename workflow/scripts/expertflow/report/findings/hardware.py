"""Findings on the card: its memory, its counters, and the settings measured to slow it.

Temperatures are never judged: the driver says when it is hot.
"""

from collections.abc import Callable
from typing import Any

from expertflow.plan.records import USABLE_FRACTION
from expertflow.report import format as f
from expertflow.report.ablation_facts import (
    NOTABLE,
    ablations,
    changes,
    interval,
    is_faster,
    quoted,
)
from expertflow.report.derive import NO_PRICE
from expertflow.report.findings.evidence import (
    KERNEL_BUSY_PERCENT,
    NO_LOSS,
    NOT_TIMED,
    POWER_LOW_FRACTION,
    SM_BUSY_PERCENT,
    TENSOR_LOW_PERCENT,
    Report,
    finding,
    lasted,
    median,
    memory_bound,
    power_fraction,
    price,
    small_kernels,
    time_shares,
    watched,
)
from expertflow.report.format import duration, percent, size
from expertflow.report.records import Finding
from expertflow.studies.records import AblationRecord, Estimate

THERMAL_LIMIT = 0.01
BUSY_LIMIT_PERCENT = 60.0
SPILL_LIMIT = 0.01  # of the card's memory: less is the sampling of a peak
HOST_WORK = ("data", "checkpoint", "start-up")  # evaluation keeps the card busy
COUNTER_ORIGIN = "our judgement; 80 % is what DCGM's guidance calls necessary for good use"
OTHER_HARDWARE = "the ablation ran on other hardware than the training"
ONE_PROCESS = "the ablation ran in one process, and the training in several"


def short_memory(report: Report) -> Finding | None:
    retries = report["training_report"]["training"]["memory_retries"]
    if not retries:
        return None
    used = report["training_parameters"]
    times = "once" if len(retries) == 1 else f"{len(retries)} times"
    return finding(
        "memory-short",
        evidence=f"memory was short {times}; the run went on with smaller micro-batches",
        threshold="never",
        origin="the plan predicted that it fits",
        recommendation=f"set batch_size to {used['batch_size']} and gradient_accumulation_steps to"
        f" {used['gradient_accumulation_steps']}, so that the next run starts so",
        worth=NOT_TIMED,
    )


def not_staged(report: Report) -> Finding | None:
    section = report["staging"]
    notes = (section["used"] or {"rows": section, "weights": section["weights"]}).values()
    failed = [note for note in notes if note["is_fallback"]]
    if not failed:
        return None
    what = " and ".join(note["kind"] for note in failed)
    return finding(
        "not-staged",
        evidence=f"{what} were read where they are: {failed[0]['reason']}",
        threshold="none",
        origin="a fallback is said",
        recommendation="make room on the scratch disk, name another one with scratch, or set it to"
        " null",
        worth=NOT_TIMED,
    )


def recomputation(report: Report) -> Finding | None:
    model = report["model"]
    total = report["training_report"]["hardware"]["gpu"]["memory_total_bytes"]
    without = report["plan"]["without_checkpointing_peak_bytes"]
    checkpointed = report["training_parameters"]["gradient_checkpointing"]
    if not checkpointed or None in (total, without) or not lasted(report):
        return None
    if without >= USABLE_FRACTION * total:
        return None
    again = 1 - model["flops_per_token_model"] / model["flops_per_token_hardware"]
    return finding(
        "recomputation",
        evidence=f"activations were computed twice, {percent(again)} of the hardware's FLOPs;"
        f" without that a peak of at most {size(without)} of {size(total)} is predicted",
        threshold=f"keep them where the prediction is below {percent(USABLE_FRACTION)} of memory",
        recommendation="gradient_checkpointing: false",
        worth=price(report, recomputed_s(report), "the same share of the time of the steps"),
    )


def recomputed_s(report: Report) -> float:
    model, train_s = report["model"], report["time"]["train_s"]
    return float((1 - model["flops_per_token_model"] / model["flops_per_token_hardware"]) * train_s)


def switch_costs(report: Report) -> Finding | None:
    """Find a setting of the plan that was measured to slow it; the one that slows it most.

    Gains of several changes do not add up: only the largest is priced.
    """
    found = [
        (record, bar, bar.ratio)
        for record in ablations(report)
        for bar in changes(record)
        if is_faster(bar) and bar.ratio is not None
    ]
    if not found:
        return None
    record, best, ratio = max(found, key=lambda item: item[2].value)
    others = [quoted(bar.label) for _, bar, _ in reversed(found) if bar is not best]
    more = f"; so are {', '.join(others)}" if others else ""
    return finding(
        "switch-costs",
        evidence=f"with {quoted(best.label)} the plan trains {f.factor(ratio.value)} as fast"
        f" (95 % interval {interval(ratio)}, over {record.n_repeats} pairs of runs){more}",
        threshold=f"no single change whose interval lies above {f.factor(NOTABLE)}",
        origin="measured by the ablation",
        recommendation=f"the settings of variant {best.name} (config/ablations), or tune this"
        " expert",
        worth=_worth(report, record, ratio),
    )


def _worth(report: Report, record: AblationRecord, ratio: Estimate) -> tuple[float | None, str]:
    """Price the time of the steps that the change would have saved, less what is priced already.

    Recomputed activations have a price of their own, and the change may be just to keep them.
    """
    hardware, rate = report["training_report"]["hardware"], report["cost"]["usd_per_hour"]
    if report["training_parameters"]["world_size"] > 1:
        return None, ONE_PROCESS
    if not _is_same_hardware(record, hardware):
        return None, OTHER_HARDWARE
    if rate is None:
        return None, NO_PRICE
    priced_s = recomputed_s(report) if recomputation(report) else 0.0
    saved_s = report["time"]["train_s"] * (1 - 1 / ratio.value)
    lost_s = max(0.0, saved_s - priced_s)
    less = ", less what is priced as recomputation" if priced_s else ""
    return rate * lost_s / 3600, (
        f"the time of the steps that this ratio saves{less} ({f.duration(lost_s)}),"
        f" at ${rate:g} an hour; the most that a fix can save"
    )


def _is_same_hardware(record: AblationRecord, hardware: dict[str, Any]) -> bool:
    if (record.device, record.gpu_name) != (hardware["device"], hardware["gpu"]["name"]):
        return False
    facts = hardware["machine"] or {}
    n_cpus, model = facts.get("n_cpus_usable"), facts.get("cpu_model")
    if record.machine is None or n_cpus is None:
        return True
    # As the ablation's records name it.
    return record.machine == f"{n_cpus} processors, {model or 'unnamed'}"


def memory_bound_kernels(report: Report) -> Finding | None:
    if not watched(report) or not memory_bound(report):
        return None
    tensor, sm = median(report, "tensor_active_percent"), median(report, "sm_active_percent")
    return finding(
        "memory-bound-kernels",
        worth=NOT_TIMED,
        evidence=f"multiprocessors were active {sm:.0f} % of the time, tensor cores {tensor:.0f} %",
        threshold=f"tensor cores below {TENSOR_LOW_PERCENT:.0f} % while multiprocessors are above"
        f" {SM_BUSY_PERCENT:.0f} % (medians)",
        origin=COUNTER_ORIGIN,
        recommendation="fused norms and activations (torch_compile), or a larger micro-batch",
    )


def many_small_kernels(report: Report) -> Finding | None:
    if not watched(report) or not small_kernels(report):
        return None
    kernel, power = median(report, "any_kernel_percent"), power_fraction(report)
    assert power is not None
    return finding(
        "small-kernels",
        worth=NOT_TIMED,
        evidence=f"some kernel ran {kernel:.0f} % of the time, at {percent(power)} of the power"
        " limit",
        threshold=f"above {KERNEL_BUSY_PERCENT:.0f} % busy, below {percent(POWER_LOW_FRACTION)} of"
        " the limit (medians)",
        recommendation="torch_compile: true, or a larger micro-batch: fewer and larger kernels",
    )


def idle_card(report: Report) -> Finding | None:
    stats = report["training_report"]["hardware"]["any_kernel_percent"]
    if stats is None or not watched(report) or stats["mean"] >= BUSY_LIMIT_PERCENT:
        return None
    shares = time_shares(report)
    cause = max(HOST_WORK, key=lambda name: shares[name])
    # Half of the idle time put down to one part of wall time is a cause; less is a guess.
    known = shares[cause] >= 0.5 * (1 - stats["mean"] / 100)
    why = "the times of the run do not tell why; inside the steps the host is the first suspect"
    if known:
        why = f"{cause} took {percent(shares[cause])} of wall time"
    return finding(
        "idle-card",
        evidence=f"some kernel ran {stats['mean']:.0f} % of the time; {why}",
        threshold=f"at least {BUSY_LIMIT_PERCENT:.0f} % (mean)",
        origin="the low end of the band that an earlier set-up worked by",
        recommendation=(
            f"see what this report says of {cause}"
            if known
            else "torch_compile: true, or a larger micro-batch"
        ),
        worth="the parts of wall time behind it are priced on their own",
    )


def throttled(report: Report) -> Finding | None:
    hardware = report["training_report"]["hardware"]
    causes, watched_s = hardware["throttle_s"], hardware["watched_s"]
    if causes is None or not watched_s or not watched(report):
        return None
    hot_s = max((s for name, s in causes.items() if "thermal" in name), default=0.0)
    if hot_s <= THERMAL_LIMIT * watched_s:
        return None
    return finding(
        "thermal-throttling",
        evidence=f"the driver held the clocks back for heat {percent(hot_s / watched_s)} of the"
        f" time ({duration(hot_s)})",
        threshold=f"at most {percent(THERMAL_LIMIT)} of the time",
        recommendation="better cooling, or another host",
        worth="how much slower the steps were for it was not measured",
    )


def spilled(report: Report) -> Finding | None:
    hardware = report["training_report"]["hardware"]
    lost, total = hardware["memory_spilled_bytes"], hardware["gpu"]["memory_total_bytes"]
    if None in (lost, total) or not watched(report) or lost <= SPILL_LIMIT * total:
        return None
    return finding(
        "memory-spilled",
        worth=NOT_TIMED,
        evidence=f"{size(lost)} of device memory lay in the memory of the host",
        threshold=f"at most {percent(SPILL_LIMIT)} of the card's {size(total)}",
        recommendation="a smaller micro-batch at the same global batch, or gradient_checkpointing",
    )


def room_for_more(report: Report) -> Finding | None:
    parameters, hardware = report["training_parameters"], report["training_report"]["hardware"]
    after, total = _next_peak(report), hardware["gpu"]["memory_total_bytes"]
    if after is None or not total or after >= USABLE_FRACTION * total or not lasted(report):
        return None
    micro, accumulation = parameters["batch_size"], parameters["gradient_accumulation_steps"]
    if accumulation % 2 or report["training_report"]["training"]["memory_retries"]:
        return None
    if parameters["gradient_checkpointing"]:
        return None  # room is better spent on keeping activations: another rule
    return finding(
        "memory-room",
        severity="info",
        evidence=f"a micro-batch of {2 * micro} is predicted to need at most {size(after)} of"
        f" {size(total)}",
        threshold=f"the next micro-batch would take {percent(USABLE_FRACTION)} of memory or more",
        recommendation=f"batch_size: {2 * micro}, gradient_accumulation_steps: {accumulation // 2}",
        worth=f"{NO_LOSS} that was measured",
    )


def _next_peak(report: Report) -> float | None:
    plan, found = report["plan"], report["training_report"]["hardware"]
    after, planned = plan["next_micro_batch_peak_bytes"], plan["memory_peak_bytes"]
    if not after or not planned:
        return None
    actual = found["memory_peak_reserved_bytes"] or planned
    return float(after * max(1.0, actual / planned))


RULES: tuple[Callable[[Report], Finding | None], ...] = (
    short_memory, not_staged, recomputation, switch_costs, memory_bound_kernels, many_small_kernels,
    idle_card, throttled, spilled, room_for_more,
)  # fmt: skip
