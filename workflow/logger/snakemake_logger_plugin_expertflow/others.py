"""What jobs beside the training should take: each as long as its last success here.

Each job's attempts are recorded beside its log, in ``{job}.attempts.json``.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class OtherJobs:
    """Seconds of the jobs that ran here before, and the rules of those that did not."""

    seconds: list[float] = field(default_factory=list)
    never_ran: set[str] = field(default_factory=set)

    def add_job(self, rule: str, log: Any) -> None:
        seconds = last_success_s(log)
        if seconds is None:
            self.never_ran.add(rule)
        else:
            self.seconds.append(seconds)

    @property
    def hours(self) -> float:
        return sum(self.seconds) / 3600

    def describe(self, hours: str) -> str:
        """Return the line below the table, ``hours`` formatted; empty without such jobs."""
        parts = []
        if self.seconds:
            parts.append(f"{hours} hours, as the last runs of {len(self.seconds)} here took")
        if self.never_ran:
            parts.append(f"unknown for what never ran here: {', '.join(sorted(self.never_ran))}")
        return f"Other jobs: {'; '.join(parts)}" if parts else ""


def last_success_s(log: Any) -> float | None:
    """Return how long the job of a log took when it last succeeded; null if it never did."""
    try:
        [path] = log
        attempts = json.loads(Path(path).with_suffix(".attempts.json").read_bytes())["attempts"]
        done = [one["end_s"] - one["start_s"] for one in attempts if one["code"] == 0]
        return float(done[-1])
    except (OSError, LookupError, TypeError, ValueError):
        return None
