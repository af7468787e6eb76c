"""The record of a guarded run."""

from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.rental.sync.store import SendRecord

Outcome = Literal["finished", "failed", "budget", "idle", "stalled", "notice", "signal"]


class GuardRecord(Record, frozen=True, kw_only=True):
    """A guarded run. ``exit_code`` is the command's own; ``usd`` includes earlier sessions."""

    outcome: Outcome
    why: str
    exit_code: int | None
    started_at: str
    elapsed_s: float = 0.0
    usd_per_hour: float | None
    usd_before: float | None
    usd: float | None = None
    max_usd: float | None
    signals: tuple[str, ...] = ()
    idle_timer: str
    pulls: tuple[str, ...] = ()
    pushes: tuple[SendRecord, ...] = ()
    syncs: tuple[SendRecord, ...] = ()
    failures: tuple[str, ...] = ()
    on_finish: str = ""
    unavailable: dict[str, str] = field(default_factory=dict)
