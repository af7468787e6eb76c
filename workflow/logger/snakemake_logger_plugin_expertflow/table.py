"""The table: per expert, what would run, the forecast of its training, and its basis.

Below it, what the other jobs should take: each as long as its last success here, or else a modeled
time.
"""

import logging
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

from snakemake_logger_plugin_expertflow.jobs import ATTEMPTS, find_log, last_success_s

TITLE = "What the trainings should take; other jobs are not included"
NOTHING = "Nothing to train."
HEADER = ("expert", "jobs", "hours", "dollars", "on", "basis")
UNKNOWN = "unknown"
TRAIN = "train_expert"
# A forecast rests on a record. If this run rebuilds that record, the forecast is from the old one.
MADE_BY = {
    "plan": "plan_training",
    "calibrated plan": "plan_training",
    "estimate from packed tokens": "pack_sequences",
}
# The workflow's forecast for a job that it models, see forecast_jobs.py.
SECONDS = re.compile(r"([\d.e+-]+) to ([\d.e+-]+) s")
# What the time of another job is known from.
BASES = LAST_RUN, MODELED = "as last run here", "as modeled"
Line = tuple[str, ...]


@dataclass(slots=True)
class PendingJobs:
    """The rules of each expert's jobs that would run, and the forecast of its training.

    ``others`` are the other jobs: what each is known from, and its least and most seconds.
    """

    rules: dict[str, list[str]] = field(default_factory=dict)
    forecasts: dict[str, str] = field(default_factory=dict)
    others: list[tuple[str, float, float]] = field(default_factory=list)
    never_ran: set[str] = field(default_factory=set)

    def add_job(self, record: logging.LogRecord) -> None:
        """Add the job of a JOB_INFO event; jobs that belong to no expert are ignored."""
        event = vars(record)
        rule, wildcards = event.get("rule_name"), event.get("wildcards")
        expert = wildcards.get("expert") if isinstance(wildcards, dict) else None
        if not isinstance(rule, str) or not isinstance(expert, str):
            return
        forecast, log = str(getattr(event.get("resources"), "forecast", "")), find_log(record)
        # A module's rules may have other names, with the same logs.
        if log and log.stem in (TRAIN, *MADE_BY.values()):
            rule = log.stem
        self.rules.setdefault(expert, []).append(rule)
        if rule == TRAIN:
            self.forecasts[expert] = forecast
        elif log and (took_s := last_success_s(log.with_suffix(ATTEMPTS))) is not None:
            self.others.append((LAST_RUN, took_s, took_s))
        elif modeled := SECONDS.fullmatch(forecast):
            self.others.append((MODELED, float(modeled[1]), float(modeled[2])))
        else:
            self.never_ran.add(rule)

    def list_trainings(self) -> list[Line]:
        """Return a line per expert to train, sorted by name, in the order of ``HEADER``."""
        return [
            (expert, str(len(self.rules[expert])), *_parse(forecast, self.rules[expert]))
            for expert, forecast in sorted(self.forecasts.items())
        ]


def _parse(forecast: str, rules: list[str]) -> Line:
    # `0.4 to 0.9 hours; 1 to 2 dollars; 1 x H100; plan; $2.49/h`: the basis may contain more "; ".
    parts = forecast.split("; ", 3)
    if len(parts) != 4:
        parts = [UNKNOWN, UNKNOWN, UNKNOWN, "no forecast; jobs in groups have none"]
    hours, dollars, hardware, basis = parts
    if MADE_BY.get(basis.split(";")[0].split(":")[0]) in rules:
        basis += "; rebuilt in this run, these figures are from before"
    return hours.removesuffix(" hours"), dollars.removesuffix(" dollars"), hardware, basis


def add_ranges(texts: list[str]) -> str:
    """Add up ranges; unknown if one of them is.

    >>> add_ranges(["0.5 to 1.5", "2 to 4.1"])
    '2.5 to 5.6'
    """
    try:
        pairs = [tuple(map(float, text.split(" to "))) for text in texts]
        low, high = (sum(values) for values in zip(*pairs, strict=True))
    except ValueError:
        return UNKNOWN
    return f"{_number(low)} to {_number(high)}"


def print_table(jobs: PendingJobs, stream: TextIO) -> None:
    """Print one line per expert, and below them the sums."""
    lines = jobs.list_trainings()
    if lines:
        _print_trainings(lines, stream)
    else:
        print(f"\n{NOTHING}", file=stream)
    for text in _sums(jobs, lines):
        print(text, file=stream)


def _sums(jobs: PendingJobs, lines: list[Line]) -> list[str]:
    low = sum(least_s for _, least_s, _ in jobs.others) / 3600
    high = sum(most_s for _, _, most_s in jobs.others) / 3600
    counts, parts = Counter(basis for basis, *_ in jobs.others), []
    if counts:
        spent = " to ".join(dict.fromkeys((_number(low), _number(high))))
        bases = ", ".join(f"{counts[basis]} {basis}" for basis in BASES if counts[basis])
        parts.append(f"{spent} hours, {bases}")
    if jobs.never_ran:
        parts.append(f"unknown for those that never ran: {', '.join(sorted(jobs.never_ran))}")
    found = [f"Other jobs: {'; '.join(parts)}"] if parts else []
    hours = add_ranges([line[2] for line in lines])
    if not parts or jobs.never_ran or hours == UNKNOWN:
        return found
    total = f"Total: {_add(hours, low, high)} hours"
    # Other jobs can be priced only if all trainings have the same price per hour.
    prices = {price for line in lines for price in re.findall(r"\$([\d.]+)/h", line[-1])}
    dollars = add_ranges([line[3] for line in lines])
    if dollars != UNKNOWN and len(prices) == 1:
        price = float(prices.pop())
        total += f", {_add(dollars, low * price, high * price)} dollars"
    return [*found, f"{total}, one job at a time"]


def _add(text: str, low: float, high: float) -> str:
    return add_ranges([text, f"{low} to {high}"])


def _print_trainings(lines: list[Line], stream: TextIO) -> None:
    _, n_jobs, all_hours, all_dollars, *_ = zip(*lines, strict=True)
    hours = add_ranges(list(all_hours))
    if len(lines) > 1 and hours != UNKNOWN:
        total = str(sum(map(int, n_jobs)))
        lines = [*lines, ("total", total, hours, add_ranges(list(all_dollars)), "", "")]
    table = [HEADER, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{TITLE}", file=stream)
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip(), file=stream)


def _number(value: float) -> str:
    """Format two significant digits, without an exponent.

    >>> _number(0.123), _number(4.56), _number(123.4)
    ('0.12', '4.6', '123')
    """
    n_decimals = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0  # 0.123: 2
    return f"{value:.{n_decimals}f}"
