"""Find what is worth changing, what limited the run, and whether it met the acceptance bars.

A rule is a small function of the finished report. It is silent without enough evidence, and only
measured losses get a price: ``worth_usd`` is the most that a fix can save. The priced times are
disjoint, so together they cost at most the run.
"""

import operator
import re
from collections.abc import Callable
from math import isnan
from typing import Any, Literal

from expertflow.core.errors import ConfigError
from expertflow.report.findings import data, hardware, learned, lost_time, run
from expertflow.report.findings import evidence as e
from expertflow.report.format import NBSP, percent
from expertflow.report.measured import is_measured
from expertflow.report.records import AcceptanceRule, AcceptanceVerdict, Bottleneck, Finding, Report

MISSING = object()
NO_TIME = Bottleneck(class_="unknown", confidence="low", evidence=())

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}
WEIGHT = {"problem": 0, "warning": 1, "info": 2}
TENSOR_HIGH_PERCENT = 50.0
MFU_HIGH = 0.40  # the best published bf16 runs of 1-8B dense models reach 46 to 50 %
SURE_FRACTION, VERY_SURE_FRACTION = 0.5, 0.7


def list_findings(report: Report) -> tuple[Finding, ...]:
    """Run every function ``find_*`` of the topics; return findings by severity, then by cost."""
    rules = [
        rule
        for topic in (lost_time, learned, hardware, data, run)
        for name, rule in vars(topic).items()
        if name.startswith("find_")
    ]
    findings = [finding for rule in rules for finding in rule(report)]
    # sorted is stable: equals stay in the order of the topics.
    return tuple(sorted(findings, key=lambda f: (WEIGHT[f.severity], -(f.worth_usd or 0.0))))


def find_bottleneck(report: Report) -> Bottleneck:
    """Return the largest part of wall time, with its evidence.

    If that is the step itself, the card's counters distinguish arithmetic, memory, and kernel
    launches. Without counters the answer stays ``step``.
    """
    shares = e.time_shares(report)
    if not shares:
        return NO_TIME
    largest: Any = max(shares, key=lambda name: shares[name])
    evidence = [f"{name}: {percent(share)}" for name, share in shares.items() if share > 0]
    counted: Any = None
    if largest == "step":
        counted, counters = _inside_step(report)
        evidence += counters
    # Short runs are mostly startup, which says little about a long one.
    sure = shares[largest] >= SURE_FRACTION and e.is_long_enough(report)
    very = counted is not None and shares[largest] >= VERY_SURE_FRACTION
    return Bottleneck(
        class_=counted or largest,
        confidence="high" if sure and very else "medium" if sure else "low",
        evidence=tuple(line.replace(NBSP, " ") for line in evidence),
    )


def _inside_step(report: Report) -> tuple[str | None, list[str]]:
    """Return what limits a step; None if counters are missing or inconclusive."""
    if report.training_report.hardware.samples < e.MIN_SAMPLES:
        return None, []
    card, mfu = e.read_counters(report), report.throughput.mfu_fraction
    medians = {
        "tensor cores active": card.tensor,
        "multiprocessors active": card.sm,
        "any kernel running": card.kernel,
    }
    evidence = [f"{name}: {x:.0f} % (median)" for name, x in medians.items() if not isnan(x)]
    evidence += [] if isnan(card.power) else [f"power: {percent(card.power)} of the limit (median)"]
    evidence += [f"MFU: {percent(mfu)}"] if is_measured(mfu) else []
    if card.is_memory_bound:
        return "memory-bound kernels", evidence
    if card.has_small_kernels:
        return "small kernels", evidence
    # Cards without that counter are judged by MFU.
    by_mfu = isnan(card.tensor) and (mfu or 0.0) >= MFU_HIGH
    arithmetic = by_mfu or card.tensor >= TENSOR_HIGH_PERCENT
    return ("compute" if arithmetic else None), evidence


def apply_rule(report: dict[str, Any], rule: AcceptanceRule) -> AcceptanceVerdict:
    """Judge report.json by a bar; raise ConfigError if its path is missing or not comparable."""
    text = f"{rule.path} {rule.op} {rule.value}"
    value = look_up(report, rule.path)
    if value is MISSING:
        where = "see workflow/schemas/report.schema.yaml (verdict is not available to bars)"
        raise ConfigError(f"acceptance: no path {rule.path!r}; {where}")
    if value is None:
        # The reason is at the path, or at a null above it.
        reasons = report["unavailable"].items()
        above = (why for at, why in reasons if f"{rule.path}.".startswith((f"{at}.", f"{at}[")))
        why = next(above, None)
        return AcceptanceVerdict(rule=text, verdict="not measured", value=None, reason=why)
    try:
        # A bar may compare texts, as with ==; text > number is its author's mistake.
        passed = OPERATORS[rule.op](value, rule.value)
    except TypeError as error:
        found = f"acceptance: {text!r} cannot be judged on {value!r:.60}"
        raise ConfigError(f"{found}; use a single figure, and a value of its type") from error
    verdict: Literal["pass", "fail"] = "pass" if passed else "fail"
    return AcceptanceVerdict(rule=text, verdict=verdict, value=value)


def look_up(report: Any, path: str) -> Any:
    """Follow a dotted path with optional indices (``a.b[0].c``); ``MISSING`` if not found."""
    value = report
    # findings[0].code -> findings, 0, code
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            # A path below a null (power_w.mean where power_w is null) was not measured either.
            return None if value is None else MISSING
    return value
