"""Find what is worth changing, and hold the run against the manifest's own bars.

A rule is a small function of the finished report. It is silent below its evidence, and only time
that was measured as lost gets a price: ``worth_usd`` is what the run paid for it, the most that a
fix can save. The priced times are disjoint, so that all of them together cost at most the run.
"""

import operator
import re
from collections.abc import Callable
from typing import Any, Literal

from expertflow.core.errors import ConfigError
from expertflow.report.findings import data, hardware, learned, run
from expertflow.report.records import AcceptanceRule, AcceptanceVerdict, Finding

Report = dict[str, Any]
MISSING = object()

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}
WEIGHT = {"problem": 0, "warning": 1, "info": 2}


def find(report: Report) -> tuple[Finding, ...]:
    """Run all rules; what weighs most comes first, then what cost most."""
    rules = (*learned.RULES, *hardware.RULES, *data.RULES, *run.RULES)
    found = [*run.lost_times(report), *(rule(report) for rule in rules), *run.false_claims(report)]
    findings = [finding for finding in found if finding is not None]
    return tuple(sorted(findings, key=lambda f: (WEIGHT[f.severity], -(f.worth_usd or 0.0))))


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
