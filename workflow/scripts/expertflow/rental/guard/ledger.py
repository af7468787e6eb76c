"""The cost of a run over all its sessions, here and on other machines."""

import math
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.attempts import hash_host
from expertflow.core.errors import ConfigError, DataError
from expertflow.core.records import read_record, write_sealed
from expertflow.plan.records import Ledger, PaidSession

LEDGER = "ledger.json"


class BudgetSpent(ConfigError):
    """No budget is left to start the command."""


class Meter:
    """Counts dollars on top of a ledger, from now or ``since_s``; none without a price."""

    def __init__(
        self,
        path: Path,
        *,
        usd_per_hour: float | None,
        max_usd: float | None = None,
        since_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now_s = time.time()
        start_s = now_s if since_s is None else min(since_s, now_s)
        earlier = () if usd_per_hour is None else read_ledger(path).sessions
        if since_s is not None:
            # This machine's sessions in the same paid period count up to its start. One that seems
            # to start in the future was timed by another clock, and counts in full.
            others = [s for s in earlier if s.machine != hash_host() or s.start_s > now_s]
            before = (s for s in earlier if s.start_s < start_s and s not in others)
            earlier = (*(replace(s, end_s=min(s.end_s, start_s)) for s in before), *others)
        self._path, self._earlier = path, earlier
        self._price, self._limit = usd_per_hour, max_usd
        paid = (max(0.0, s.end_s - s.start_s) / 3600 * s.usd_per_hour for s in earlier)
        self.usd_before = sum(paid, 0.0)
        # The system clock may be set back; from now on, spending is timed by a clock that is not.
        self._start_s, self._clock, self._zero_s = start_s, clock, clock() - (now_s - start_s)

    def total_usd(self, *, ahead_s: float = 0.0) -> float | None:
        if self._price is None:
            return None
        return self.usd_before + (self._clock() - self._zero_s + ahead_s) / 3600 * self._price

    def has_usd_for(self, wait_s: float, *, forgets: bool = False) -> bool:
        usd = self.total_usd(ahead_s=wait_s)
        return usd is None or self._limit is None or usd - forgets * self.usd_before < self._limit

    def lasts_s(self, reserve_s: float) -> float:
        """Return the seconds until only the reserve is left; TIMEOUT_MAX without a limit."""
        usd = self.total_usd()
        if usd is None or self._price is None or self._limit is None:
            return threading.TIMEOUT_MAX
        return max(0.0, self._limit - usd) / self._price * 3600 - reserve_s

    def format_usd(self) -> str:
        return f"${self.total_usd() or 0.0:.2f} of ${self._limit or 0.0:.2f}"

    def write_ledger(self) -> None:
        if self._price is not None:
            end_s = self._start_s + self._clock() - self._zero_s
            session = PaidSession(
                start_s=self._start_s, end_s=end_s, usd_per_hour=self._price, machine=hash_host()
            )
            write_sealed(self._path, Ledger(sessions=(*self._earlier, session)))


def read_ledger(path: Path) -> Ledger:
    """Read the cost of earlier sessions, if any; raise DataError for a malformed ledger."""
    if not path.is_file():
        return Ledger()
    try:
        return read_record(Ledger, path)
    except DataError as error:
        fix = "correct it, or pass --forget-spent to start a new budget"
        raise DataError(f"{str(error).rpartition('; ')[0] or error}; {fix}") from error


def merge_ledgers(mine: Ledger, other: Ledger, *, judged: Ledger) -> Ledger:
    """Add what only the other ledger has; sessions ``judged`` by a meter only if they continued."""
    # Two machines may be paid since the same moment.
    key_of = attrgetter("start_s", "machine")
    known = {key_of(session): session for session in mine.sessions}
    for session in other.sessions:
        same = (s for s in (*mine.sessions, *judged.sessions) if key_of(s) == key_of(session))
        if session.end_s > max((s.end_s for s in same), default=-math.inf):
            known[key_of(session)] = session
    return Ledger(sessions=tuple(known[key] for key in sorted(known)))
