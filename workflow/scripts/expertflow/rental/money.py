"""Dollars: what a run has cost over all its sessions, and when it has to stop."""

import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.records import Record, read_record, write_record

# Longer transfers than the last ones are likely: networks vary.
MARGIN = 1.5


class Session(Record, frozen=True, kw_only=True):
    """A stretch of paid time, as Unix times."""

    start_s: float
    end_s: float
    usd_per_hour: float

    def usd(self) -> float:
        """Give what it cost."""
        return max(0.0, self.end_s - self.start_s) / 3600 * self.usd_per_hour


class Ledger(Record, frozen=True, kw_only=True):
    """All sessions that count towards one budget."""

    sessions: tuple[Session, ...] = ()


class Meter:
    """Counts dollars from now, or from when the machine began to be paid, on top of a ledger.

    ``path`` is written with every ``note``, so that a run that is killed keeps what it spent.
    """

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
        self._session = Session(start_s=start_s, end_s=now_s, usd_per_hour=usd_per_hour)
        earlier = read_ledger(path).sessions
        if since_s is not None:
            # Sessions of this same paid stretch are in it: they count up to its begin. One that
            # seems to begin later than now was timed by another clock, and counts in full.
            before = [s for s in earlier if s.start_s < start_s]
            later = [s for s in earlier if s.start_s > now_s]
            clipped = [replace(s, end_s=min(s.end_s, start_s)) for s in before]
            earlier = (*clipped, *later)
        self._earlier = earlier
        self.usd_before = sum((s.usd() for s in earlier), 0.0)

    @property
    def elapsed_s(self) -> float:
        """Give the seconds since the guard started."""
        return self._clock() - self._zero_s

    def usd(self, *, ahead_s: float = 0.0) -> float:
        """Give what is spent by now, or will be in a while."""
        paid_s = self._paid_before_s + self.elapsed_s + ahead_s
        return self.usd_before + paid_s / 3600 * self._session.usd_per_hour

    def lasts_s(self, limit_usd: float) -> float:
        """Give the seconds after which a limit is spent; 0 where it is."""
        return max(0.0, limit_usd - self.usd()) / self._session.usd_per_hour * 3600

    def note(self) -> None:
        """Write down what is spent."""
        session = self._session
        end_s = session.start_s + self._paid_before_s + self.elapsed_s
        write_record(self._path, Ledger(sessions=(*self._earlier, replace(session, end_s=end_s))))


def read_ledger(path: Path) -> Ledger:
    """Read what earlier sessions cost; nothing where there were none.

    Raises:
        DataError: the file is no ledger.
    """
    if not path.is_file():
        return Ledger()
    try:
        return read_record(Ledger, path)
    except DataError as error:
        raise DataError(f"{error}; or give --forget-spent to begin a new budget") from error


def merge(path: Path, other: Path, *, judged: Ledger | None = None) -> None:
    """Add sessions that only the other ledger knows, or knows for longer.

    ``judged`` are sessions that a meter has counted or clipped already; they come in again only
    where they went on since.
    """
    known = {session.start_s: session for session in read_ledger(path).sessions}
    ends_s = {session.start_s: session.end_s for session in (judged or Ledger()).sessions}
    for session in read_ledger(other).sessions:
        mine = known.get(session.start_s)
        if session.start_s in ends_s and session.end_s <= ends_s[session.start_s]:
            continue
        if mine is None or mine.end_s < session.end_s:
            known[session.start_s] = session
    write_record(path, Ledger(sessions=tuple(known[start] for start in sorted(known))))


def reserve_s(*, floor_s: float, save_s: float, unsent_bytes: int, bytes_per_s: float) -> float:
    """Give the seconds to keep for the last save and for sending what is not sent.

    ``save_s`` and ``bytes_per_s`` are measured; 0 where nothing was measured yet.

    >>> reserve_s(floor_s=60, save_s=20, unsent_bytes=8 * 10**9, bytes_per_s=10**8)
    150.0
    """
    sending_s = unsent_bytes / bytes_per_s if bytes_per_s else 0.0
    return max(floor_s, MARGIN * (save_s + sending_s))
