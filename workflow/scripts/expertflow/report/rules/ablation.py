"""Rules over what an ablation measured on this hardware."""

from typing import Any

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
from expertflow.report.finding import Report, finding
from expertflow.report.records import Finding
from expertflow.report.rules.time import recomputation, recomputed_s
from expertflow.studies.records import AblationRecord, Estimate

OTHER_HARDWARE = "the ablation ran on other hardware than the training"
ONE_PROCESS = "the ablation ran in one process, and the training in several"


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
        evidence=(
            f"with {quoted(best.label)} the plan trains {f.factor(ratio.value)} as fast"
            f" (95 % interval {interval(ratio)}, over {record.n_repeats} pairs of runs){more}"
        ),
        threshold=f"no single change whose interval lies above {f.factor(NOTABLE)}",
        origin="measured by the ablation",
        recommendation=(
            f"the settings of variant {best.name} (config/ablations), or tune this expert"
        ),
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
    """Compare device, card and processors; a run that did not describe its machine may be any."""
    if (record.device, record.gpu_name) != (hardware["device"], hardware["gpu"]["name"]):
        return False
    facts = hardware["machine"] or {}
    n_cpus, model = facts.get("n_cpus_usable"), facts.get("cpu_model")
    if record.machine is None or n_cpus is None:
        return True
    # As the ablation's records name it.
    return record.machine == f"{n_cpus} processors, {model or 'unnamed'}"
