"""Record when each attempt of a job ran, on which machine, and with how many cards.

Beside the log of a job, ``{job}.log``, stands ``{job}.attempts.json``: its last success and the
attempts before it that failed. A running attempt touches the file every second, so that one that
was killed ends where the file was last touched.
"""

import getpass
import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.records import Record, read_record, write_sealed

log = logging.getLogger(__name__)
# Set by the rule for its script alone; not for the processes that the script starts.
LOG, CARDS = "EXPERTFLOW_LOG", "EXPERTFLOW_CARDS"
TOUCH_EVERY_S = 1.0
_IMPORTED_S = time.monotonic()


class Attempt(Record, frozen=True, kw_only=True):
    """One process of a job; times are seconds of the system's clock.

    ``code`` is its exit code, null while it runs or if it was killed. ``n_cards`` is what the rule
    requested.
    """

    start_s: float
    end_s: float
    code: int | None = None
    machine: str
    n_cards: int


class Attempts(Record, frozen=True, kw_only=True):
    attempts: tuple[Attempt, ...] = ()


def attempts_path(log_path: Path) -> Path:
    return log_path.with_suffix(".attempts.json")


def read_attempts(path: Path) -> tuple[Attempt, ...]:
    """Return a job's attempts in order, none if there is no file; DataError if it is damaged."""
    if not path.is_file():
        return ()
    touched_s = path.stat().st_mtime
    attempts = read_record(Attempts, path).attempts
    if attempts and attempts[-1].code is None:
        last = attempts[-1]
        attempts = (*attempts[:-1], replace(last, end_s=max(last.end_s, touched_s)))
    return attempts


@contextmanager
def record_attempt() -> Iterator[None]:
    """Record the block as an attempt of the job that the environment names, if it names one."""
    place, n_cards = os.environ.pop(LOG, None), int(os.environ.pop(CARDS, "0"))
    # On several machines the first process speaks for all.
    if place is None or os.environ.get("SLURM_PROCID", "0") != "0":
        yield
        return
    path, now_s = attempts_path(Path(place)), time.time()
    start_s = now_s - process_age_s()
    attempt = Attempt(start_s=start_s, end_s=now_s, machine=hash_host(), n_cards=n_cards)
    earlier = _failed_before(path)
    _write(path, (*earlier, attempt))
    is_over = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, is_over), daemon=True)
    toucher.start()
    code = 1
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        is_over.set()
        toucher.join()
        _write(path, (*earlier, replace(attempt, end_s=time.time(), code=code)))


def process_age_s() -> float:
    """Return the seconds since this process started, to the kernel's tick (0.01 s).

    Outside Linux it is the seconds since this module was imported.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return time.monotonic() - _IMPORTED_S
    # Field 22 is the start in ticks since boot; field 2, a name in brackets, may contain anything.
    n_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - n_ticks / os.sysconf("SC_CLK_TCK")


def hash_host() -> str:
    """Return a hash that tells machines apart without naming them."""
    host = f"{getpass.getuser()}@{platform.node()}"
    return hashlib.sha256(host.encode()).hexdigest()[:12]


def _failed_before(path: Path) -> tuple[Attempt, ...]:
    try:
        earlier = read_attempts(path)
    except DataError as error:
        log.warning("%s; earlier attempts are not counted", error)
        return ()
    return () if earlier and earlier[-1].code == 0 else earlier


def _write(path: Path, attempts: tuple[Attempt, ...]) -> None:
    try:
        write_sealed(path, Attempts(attempts=attempts))
    except OSError as error:
        # A job that did its work does not fail for its receipt.
        log.warning("%s: this attempt's times are not recorded (%s)", path, error)


def _touch(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(TOUCH_EVERY_S):
        try:
            os.utime(path)
        except OSError as error:
            log.warning("%s: this attempt's end may be lost (%s)", path, error)
            return
