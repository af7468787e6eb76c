"""What the guard writes down: what a run cost, why it ended, what was copied and verified."""

from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.rental.sync.records import SendRecord

Outcome = Literal["finished", "failed", "budget", "idle", "stalled", "notice", "signal"]


class GuardRecord(Record, frozen=True, kw_only=True):
    """A guarded run. ``exit_code`` is the command's own; ``usd`` counts earlier sessions, too."""

    outcome: Outcome
    why: str
    exit_code: int
    started_at: str
    elapsed_s: float
    usd_per_hour: float | None
    usd_before: float | None
    usd: float | None
    max_usd: float | None
    signals: tuple[str, ...]
    idle_timer: str
    pulls: tuple[str, ...]
    pushes: tuple[SendRecord, ...]
    syncs: tuple[SendRecord, ...]
    failures: tuple[str, ...]
    on_finish: str
    unavailable: dict[str, str] = field(default_factory=dict)
