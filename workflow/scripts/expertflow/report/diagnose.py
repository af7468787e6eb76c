"""Find what is worth changing, and hold the run against the manifest's own bars.

A rule is a small function of the finished report. It is silent below its evidence, and only time
that was measured as lost gets a price: ``worth_usd`` is what the run paid for it, the most that a
fix can save.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from expertflow.core.errors import ConfigError
from expertflow.report.format import NBSP, duration, percent
from expertflow.report.records import AcceptanceRule, AcceptanceVerdict, Finding

Report = dict[str, Any]

ORIGIN = "our judgement, not yet calibrated on runs"
MIN_STEPS = 20  # fewer steps say little about waiting: the first ones start workers
MIN_WALL_S = 60.0  # in a shorter run every fixed cost looks large
MISSING = object()

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LostTime:
    """A part of wall time that should stay below a share of it."""

    code: str
    parts: tuple[str, ...]
    limit: float
    what: str
    recommendation: str


LOST_TIMES = (
    LostTime(
        code="data-wait",
        parts=("data_wait_s",),
        limit=0.05,
        what="waiting for data",
        recommendation="stage the rows on a local disk, or compare 2, 4 and 8 loader workers",
    ),
    LostTime(
        code="checkpoint-time",
        parts=("checkpoint_s",),
        limit=0.02,
        what="saving checkpoints",
        recommendation="save more rarely (save_every_minutes), or to a faster disk",
    ),
    LostTime(
        code="evaluation-time",
        parts=("eval_s",),
        limit=0.05,
        what="evaluation during training",
        recommendation="evaluate more rarely (eval_steps), or on fewer held-out documents",
    ),
    LostTime(
        code="start-up",
        parts=("startup_s", "other_s"),
        limit=0.10,
        what="start-up and other fixed work",
        recommendation="train several experts in one rental, so that they share the start-up",
    ),
)


def find(report: Report) -> tuple[Finding, ...]:
    """Run all rules; what cost most comes first, then what weighs most."""
    found = [_lost_time(report, rule) for rule in LOST_TIMES]
    found += [
        rule(report)
        for rule in (_leak, _short_memory, _no_licence, _padding, _few_steps, _long_rows)
    ]
    weight = {"problem": 0, "warning": 1, "info": 2}
    findings = [_plain_spaces(finding) for finding in found if finding is not None]
    return tuple(sorted(findings, key=lambda f: (weight[f.severity], -(f.worth_usd or 0.0))))


def _lost_time(report: Report, rule: LostTime) -> Finding | None:
    time, rate = report["time"], report["cost"]["usd_per_hour"]
    lost_s, wall_s = sum(time[part] for part in rule.parts), time["wall_s"]
    too_few = report["training_report"]["training"]["steps"] < MIN_STEPS
    if too_few or wall_s < MIN_WALL_S or lost_s <= rule.limit * wall_s:
        return None
    return Finding(
        code=rule.code,
        severity="warning",
        evidence=f"{rule.what} took {percent(lost_s / wall_s)} of wall time ({duration(lost_s)})",
        threshold=f"at most {percent(rule.limit)}",
        threshold_origin=ORIGIN,
        recommendation=rule.recommendation,
        worth_usd=None if rate is None else rate * lost_s / 3600,
    )


def _plain_spaces(finding: Finding) -> Finding:
    """Take no-break spaces out: report.json is searched with plain ones, the page ties its own."""
    return replace(
        finding,
        evidence=finding.evidence.replace(NBSP, " "),
        threshold=finding.threshold.replace(NBSP, " "),
    )


def _short_memory(report: Report) -> Finding | None:
    training = report["training_report"]["training"]
    if not (retries := training["memory_retries"]):
        return None
    last = retries[-1]
    times = "once" if len(retries) == 1 else f"{len(retries)} times"
    return Finding(
        code="memory-short",
        severity="warning",
        evidence=f"memory was short {times}; the run went on with smaller micro-batches",
        threshold="never",
        threshold_origin="the plan predicted that it fits",
        recommendation=(
            f"set batch_size to {last['micro_batch_size']} and gradient_accumulation_steps to"
            f" {last['n_accumulation_steps']}, so that the next run starts so"
        ),
        worth_usd=None,
    )


def _leak(report: Report) -> Finding | None:
    shared = report["evaluation"]["documents_shared_with_training"]
    if shared == 0:
        return None
    return Finding(
        code="held-out-leak",
        severity="problem",
        evidence=f"{shared} held-out documents were also trained on",
        threshold="none",
        threshold_origin="definition of held-out",
        recommendation="prepare the data again; figures of this evaluation mean nothing",
        worth_usd=None,
    )


def _no_licence(report: Report) -> Finding | None:
    names = [source["name"] for source in report["data"]["sources"] if source["licence"] is None]
    if not names:
        return None
    return Finding(
        code="no-licence",
        severity="warning",
        evidence=f"no licence is stated for {', '.join(names)}",
        threshold="one for each source",
        threshold_origin="the model inherits the duties of its data",
        recommendation="state the licence in the manifest, or leave the source out",
        worth_usd=None,
    )


def _padding(report: Report) -> Finding | None:
    padding = report["data"]["padding_fraction"]
    if padding is None or padding <= 0.10:
        return None
    return Finding(
        code="padding",
        severity="warning",
        evidence=f"{percent(padding)} of the token positions in training were padding",
        threshold=f"at most {percent(0.10)}",
        threshold_origin=ORIGIN,
        recommendation="pack several documents into a row (packing: bfd)",
        worth_usd=None,
    )


def _few_steps(report: Report) -> Finding | None:
    parameters = report["training_parameters"]
    n_steps, n_warmup = parameters["total_steps"], parameters["warmup_steps"]
    if n_steps >= 50 and n_warmup < 0.20 * n_steps:
        return None
    return Finding(
        code="few-steps",
        severity="info",
        evidence=f"{n_steps:,} steps, {n_warmup:,} of them warm-up",
        threshold=f"at least 50 steps, warm-up below {percent(0.20)}",
        threshold_origin=ORIGIN,
        recommendation="fewer tokens a step (gradient_accumulation_steps), or more epochs",
        worth_usd=None,
    )


def _long_rows(report: Report) -> Finding | None:
    data = report["data"]
    length, longest = data["seq_len"], data["length_histogram"]["max"]
    if data["packing"] != "none" or length <= 1.25 * longest:
        return None
    return Finding(
        code="rows-too-long",
        severity="info",
        evidence=f"rows hold {length:,} tokens, the longest document {longest:,}",
        threshold="at most 1.25 times the longest document, where rows are not packed",
        threshold_origin=ORIGIN,
        recommendation=f"max_seq_length: {longest:,} would hold every document",
        worth_usd=None,
    )


def bottleneck(report: Report) -> dict[str, Any]:
    """Name the largest part of wall time.

    What limits the step itself (arithmetic, memory, launches) takes counters that nobody read, so
    ``step`` is as far as the answer goes, with low confidence in anything behind it.
    """
    time = report["time"]
    shares = {
        "step": time["train_s"],
        "data": time["data_wait_s"] + (time["h2d_s"] or 0.0),
        "checkpoint": time["checkpoint_s"],
        "evaluation": time["eval_s"],
        "start-up": time["startup_s"] + time["other_s"],
    }
    wall_s = sum(shares.values())
    if wall_s <= 0:
        return {"class": "unknown", "confidence": "low", "evidence": []}
    largest = max(shares, key=lambda name: shares[name])
    evidence = [
        f"{name}: {percent(s / wall_s)}".replace(NBSP, " ") for name, s in shares.items() if s > 0
    ]
    sure = shares[largest] >= 0.5 * wall_s and report["training_report"]["training"]["steps"] >= 20
    return {"class": largest, "confidence": "medium" if sure else "low", "evidence": evidence}


def accept(report: Report, rules: tuple[AcceptanceRule, ...]) -> tuple[AcceptanceVerdict, ...]:
    """Judge each bar of the manifest.

    Raises:
        ConfigError: a path is not in the report, or holds something that cannot be compared.
    """
    return tuple(_accept_one(report, rule) for rule in rules)


def _accept_one(report: Report, rule: AcceptanceRule) -> AcceptanceVerdict:
    text = f"{rule.path} {rule.op} {rule.value}"
    value = look_up(report, rule.path)
    if value is MISSING:
        raise ConfigError(f"acceptance: report.json has no path {rule.path!r}; see its schema")
    if value is None:
        return AcceptanceVerdict(rule=text, verdict="not measured", value=None)
    try:
        passed = OPERATORS[rule.op](value, rule.value)
    except TypeError as error:
        raise ConfigError(f"acceptance: {text!r} cannot be judged on {value!r}") from error
    verdict: Literal["pass", "fail"] = "pass" if passed else "fail"
    return AcceptanceVerdict(rule=text, verdict=verdict, value=value)


def look_up(report: Report, path: str) -> Any:
    """Follow a dotted path with optional indices (``a.b[0].c``); ``MISSING`` where it ends."""
    value: Any = report
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            # A path below a null (power_w.mean where power_w is null) was not measured either.
            return None if value is None else MISSING
    return value
