"""What jobs beside the training should take: each as long as its last success here.

A job that never ran takes what the rule took for other experts of this folder. Each job's attempts
are recorded beside its log, in ``results/{expert}/logs/{job}.attempts.json``.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(slots=True)
class OtherJobs:
    """Seconds of the jobs that ran here, for this expert or others, and rules that never did."""

    seconds: list[float] = field(default_factory=list)
    of_other_experts: list[float] = field(default_factory=list)
    never_ran: set[str] = field(default_factory=set)

    def add_job(self, rule: str, log: Any) -> None:
        if (seconds := last_success_s(log)) is not None:
            self.seconds.append(seconds)
        elif others := _others_s(rule, log):
            self.of_other_experts.append(median(others))
        else:
            self.never_ran.add(rule)

    @property
    def hours(self) -> float:
        return sum(self.seconds + self.of_other_experts) / 3600

    def describe(self, hours: str) -> str:
        """Return the line below the table, ``hours`` formatted; empty without such jobs."""
        bases, parts = [], []
        if self.seconds:
            bases.append(f"as the last runs of {len(self.seconds)} here took")
        if self.of_other_experts:
            bases.append(f"as {len(self.of_other_experts)} took for other experts")
        if bases:
            parts.append(f"{hours} hours, {' and '.join(bases)}")
        if self.never_ran:
            parts.append(f"unknown for what never ran here: {', '.join(sorted(self.never_ran))}")
        return f"Other jobs: {'; '.join(parts)}" if parts else ""


def last_success_s(log: Any) -> float | None:
    """Return how long the job of a log took when it last succeeded; null if it never did."""
    try:
        [path] = log
        return _last_success_s(Path(path).with_suffix(".attempts.json"))
    except (TypeError, ValueError):
        return None


def _last_success_s(path: Path) -> float | None:
    try:
        attempts = json.loads(path.read_bytes())["attempts"]
        done = [one["end_s"] - one["start_s"] for one in attempts if one["code"] == 0]
        return float(done[-1])
    except (OSError, LookupError, TypeError, ValueError):
        return None


def _others_s(rule: str, log: Any) -> list[float]:
    """Return how long the rule's last successes took for any expert."""
    try:
        [path] = log
        results = Path(path).parents[2]
    except (IndexError, TypeError, ValueError):
        return []
    times = map(_last_success_s, results.glob(f"*/logs/{rule}*.attempts.json"))
    return [took_s for took_s in times if took_s is not None]
