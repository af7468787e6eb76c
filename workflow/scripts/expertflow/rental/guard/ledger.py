"""The cost of a run over all its sessions, here and on other machines."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import remove
from expertflow.core.records import Record, read_record, write_record
from expertflow.rental.sync.store import NotThere, Store

LEDGER, PLACE = "ledger.json", "state/.guard"


class PaidSession(Record, frozen=True, kw_only=True):
    start_s: float
    end_s: float
    usd_per_hour: float

    def usd(self) -> float:
        return max(0.0, self.end_s - self.start_s) / 3600 * self.usd_per_hour


class Ledger(Record, frozen=True, kw_only=True):
    sessions: tuple[PaidSession, ...] = ()


class Meter:
    """Counts dollars on top of a ledger, from now or from when billing began."""

    def __init__(
        self,
        path: Path,
        *,
        usd_per_hour: float,
        since_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now_s = time.time()
        self._path, self._clock, self._zero_s = path, clock, clock()
        self._paid_before_s = 0.0 if since_s is None else max(0.0, now_s - since_s)
        start_s = now_s - self._paid_before_s
        self._session = PaidSession(start_s=start_s, end_s=now_s, usd_per_hour=usd_per_hour)
        earlier = read_ledger(path).sessions
        if since_s is not None:
            # Sessions of the same paid stretch count up to its start. One that seems to start later
            # than now was timed by another clock, and counts in full.
            before = [s for s in earlier if s.start_s < start_s]
            later = [s for s in earlier if s.start_s > now_s]
            clipped = [replace(s, end_s=min(s.end_s, start_s)) for s in before]
            earlier = (*clipped, *later)
        self._earlier, self.usd_before = earlier, sum((s.usd() for s in earlier), 0.0)

    def usd(self, *, ahead_s: float = 0.0) -> float:
        return self.usd_before + self._paid_s(ahead_s) / 3600 * self._session.usd_per_hour

    def lasts_s(self, limit_usd: float) -> float:
        return max(0.0, limit_usd - self.usd()) / self._session.usd_per_hour * 3600

    def note(self) -> None:
        session = replace(self._session, end_s=self._session.start_s + self._paid_s())
        write_record(self._path, Ledger(sessions=(*self._earlier, session)))

    def _paid_s(self, ahead_s: float = 0.0) -> float:
        return self._paid_before_s + self._clock() - self._zero_s + ahead_s


class TravellingLedger:
    """The local ledger and its copy in a store, which several machines may write."""

    def __init__(self, own: Path) -> None:
        self.path, self._copy = own / LEDGER, own / "ledger"
        self._judged = Ledger()
        self._begins_anew = False

    def forget(self) -> None:
        """Start a new budget here, and with the next send in the store."""
        remove(self.path)
        self._begins_anew = True

    def pull(self, store: Store) -> None:
        if not self._begins_anew and (joined := self._joined(store)).sessions:
            write_record(self.path, joined)
        self._judged = read_ledger(self.path)

    def send(self, store: Store) -> None:
        """Update the store, keeping what other machines have written there."""
        if not self.path.is_file():
            return
        joined = read_ledger(self.path) if self._begins_anew else self._joined(store)
        try:
            # Send a copy: the ledger itself is rewritten meanwhile.
            write_record(self._copy / LEDGER, joined)
            store.send(self._copy, PLACE, [LEDGER])
            self._begins_anew = False
        finally:
            remove(self._copy)

    def _joined(self, store: Store) -> Ledger:
        mine = read_ledger(self.path)
        try:
            store.fetch(f"{PLACE}/{LEDGER}", self._copy)
            return merge(mine, read_ledger(self._copy / LEDGER), judged=self._judged)
        except NotThere:
            # No machine has sent one yet.
            return mine
        finally:
            remove(self._copy)


def read_ledger(path: Path) -> Ledger:
    """Read the cost of earlier sessions, if any; raise DataError for a malformed ledger."""
    if not path.is_file():
        return Ledger()
    try:
        return read_record(Ledger, path)
    except DataError as error:
        raise DataError(f"{error}; or give --forget-spent to begin a new budget") from error


def merge(mine: Ledger, other: Ledger, *, judged: Ledger) -> Ledger:
    """Add sessions that only the other ledger has, or has for longer.

    Sessions already ``judged`` by a meter (counted or clipped) are added only if they went on.
    """
    known = {session.start_s: session for session in mine.sessions}
    ends_s = {session.start_s: session.end_s for session in judged.sessions}
    for session in other.sessions:
        start_s = session.start_s
        if session.end_s <= ends_s.get(start_s, -math.inf):
            continue
        if start_s not in known or known[start_s].end_s < session.end_s:
            known[start_s] = session
    return Ledger(sessions=tuple(known[start_s] for start_s in sorted(known)))
