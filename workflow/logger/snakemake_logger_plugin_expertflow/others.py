"""What jobs beside the training should take: each as long as its last success here.

A job that never ran takes what its rule took for other inputs or experts of this folder, else what
is modeled of it. Each job's attempts are recorded beside its log, in
``results/{expert}/logs/{job}.attempts.json``.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ATTEMPTS = ".attempts.json"
# What the workflow says of a job that it models, see forecast_jobs.py.
SECONDS = re.compile(r"([\d.e+-]+) to ([\d.e+-]+) s")


@dataclass(slots=True)
class OtherJobs:
    """Seconds of jobs that ran here, or their rule did, or that are modeled; other rules."""

    seconds: list[float] = field(default_factory=list)
    of_other_inputs: list[float] = field(default_factory=list)
    modeled: list[tuple[float, ...]] = field(default_factory=list)
    never_ran: set[str] = field(default_factory=set)

    def add_job(self, rule: str, log: Path | None, forecast: str) -> None:
        if log and (seconds := last_success_s(log)) is not None:
            self.seconds.append(seconds)
        elif log and (others := _others_s(rule, log)):
            self.of_other_inputs.append(median(others))
        elif modeled := SECONDS.fullmatch(forecast):
            self.modeled.append(tuple(map(float, modeled.groups())))
        else:
            self.never_ran.add(rule)

    @property
    def hours(self) -> tuple[float, float]:
        """The least and the most."""
        known = sum(self.seconds + self.of_other_inputs)
        # The zeros keep zip() from being empty when nothing is modeled.
        least, most = (sum(ends) for ends in zip((0.0, 0.0), *self.modeled, strict=True))
        return (known + least) / 3600, (known + most) / 3600

    def describe(self, hours: str) -> str:
        """Return the line below the table, ``hours`` formatted; empty without such jobs."""
        bases, parts = [], []
        if self.seconds:
            bases.append(f"as the last runs of {len(self.seconds)} here took")
        if self.of_other_inputs:
            bases.append(f"as {len(self.of_other_inputs)} took for other inputs")
        if self.modeled:
            bases.append(f"{len(self.modeled)} as modeled")
        if bases:
            parts.append(f"{hours} hours, {', '.join(bases)}")
        if self.never_ran:
            parts.append(f"unknown for what never ran here: {', '.join(sorted(self.never_ran))}")
        return f"Other jobs: {'; '.join(parts)}" if parts else ""


def find_log(record: Any) -> Path | None:
    """Return the log of an event's job; null if it has none or several."""
    paths = getattr(record, "log", None) or []
    return Path(paths[0]) if len(paths) == 1 else None


def last_success_s(log: Path) -> float | None:
    """Return how long the job of a log took when it last succeeded; null if it never did."""
    try:
        attempts = json.loads(log.with_suffix(ATTEMPTS).read_bytes())["attempts"]
        done = [one["end_s"] - one["start_s"] for one in attempts if one["code"] == 0]
        return float(done[-1])
    except (OSError, LookupError, TypeError, ValueError):
        return None


def _others_s(rule: str, log: Path) -> list[float]:
    results = log.parent.parent.parent  # results/a/logs/b.log
    found = map(str, results.glob(f"*/logs/{rule}*{ATTEMPTS}"))
    times = (last_success_s(Path(f"{path.removesuffix(ATTEMPTS)}.log")) for path in found)
    return [took_s for took_s in times if took_s is not None]
