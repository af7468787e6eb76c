"""A job of a run: its name, how long it took, and the last line of its log.

Its attempts are recorded next to its log, in ``results/{expert}/logs/{job}.attempts.json``.
"""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTEMPTS = ".attempts.json"
TAIL_BYTES = 4096
CLOCK = re.compile(r"\d\d:\d\d:\d\d ")


@dataclass(slots=True)
class Job:
    stage: str
    expert: str
    details: str
    log: Path | None
    start_s: float = field(default_factory=time.time)
    next_line_s: float = 60.0  # age at which its next line is due

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.stage, self.expert, self.details)))

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.start_s

    def read_duration_s(self) -> float:
        """Return the time of the job's own process, which may have waited in a queue."""
        # A finished training that is only published again keeps its attempt from before.
        path, since_s = self.log and self.log.with_suffix(ATTEMPTS), self.start_s
        took_s = last_success_s(path, since_s=since_s) if path else None
        return self.elapsed_s if took_s is None else took_s

    def will_fail_again(self) -> bool:
        """Return whether its last attempt recorded an error that retries end with at once."""
        attempts = read_attempts(self.log.with_suffix(ATTEMPTS)) if self.log else []
        return bool(attempts and attempts[-1].get("error"))

    def read_last_line(self) -> str:
        """Return the last line that this attempt logged, without its clock; empty if none."""
        try:
            # An earlier attempt left this log; this one has written nothing yet.
            if self.log is None or self.log.stat().st_mtime < self.start_s:
                return ""
            with self.log.open("rb") as stream:
                stream.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError:
            return ""
        # Progress bars end their lines with a carriage return.
        lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
        line = CLOCK.sub("", lines[-1], count=1).strip() if lines else ""
        # Escape codes must not reach the terminal.
        return "".join(letter if letter.isprintable() else "?" for letter in line)


def read_job(record: Any) -> Job:
    wildcards = getattr(record, "wildcards", None) or {}
    details = [str(value) for name, value in wildcards.items() if name != "expert"]
    return Job(
        stage=str(getattr(record, "rule_name", "")),
        expert=str(wildcards.get("expert", "")),
        details=" ".join(details),
        log=find_log(record),
    )


def find_log(record: Any) -> Path | None:
    """Return the log of an event's job; null if it has none or several."""
    paths = getattr(record, "log", None) or []
    return Path(paths[0]) if len(paths) == 1 else None


def last_success_s(path: Path, *, since_s: float = 0.0) -> float | None:
    """Return how long a job's last attempt that succeeded since a time took; null if none did."""
    try:
        done = [one for one in read_attempts(path) if one["code"] == 0 and one["end_s"] >= since_s]
        return float(done[-1]["end_s"] - done[-1]["start_s"])
    except (LookupError, TypeError, ValueError):
        return None


def read_attempts(path: Path) -> list[Any]:
    """Return the records of a job's attempts; empty if they cannot be read."""
    try:
        return list(json.loads(path.read_bytes())["attempts"])
    except (OSError, LookupError, TypeError, ValueError):
        return []


def format_duration(seconds: float) -> str:
    """Return a duration in the report's format.

    >>> format_duration(3.25), format_duration(47), format_duration(200), format_duration(5000)
    ('3.2 s', '47 s', '3.3 min', '1.4 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
