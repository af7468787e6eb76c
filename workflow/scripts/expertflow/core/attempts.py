"""Record when each attempt of a job ran, on which machine, and with how many cards.

Next to a job's log, ``{job}.log``, is ``{job}.attempts.json``: its last success and the failed
attempts before it. A running attempt touches the file every second, so that the end of a killed one
is when the file was last touched. A training's state has the attempts that it took.
"""

import getpass
import hashlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.records import Record, read_record, write_sealed

log = logging.getLogger(__name__)
# Set by the rule for its script only, not for the processes that the script starts.
LOG, CARDS, ATTEMPT = "EXPERTFLOW_LOG", "EXPERTFLOW_CARDS", "EXPERTFLOW_ATTEMPT"
# Inherited by jobs: the run that they belong to.
RUN = "EXPERTFLOW_RUN"
# Set for processes that a launcher starts in place of the script.
START = "EXPERTFLOW_START"
ATTEMPTS = "attempts.json"
TOUCH_EVERY_S = 1.0
_environment: dict[str, str] = {}
# The states that this job trains, and whether each was already complete.
_states: dict[Path, bool] = {}


class Attempt(Record, frozen=True, kw_only=True):
    """One process of a job; times are seconds of the system's clock.

    ``code`` is its exit code, null while it runs or if it was killed. ``n_cards`` is what the rule
    requested. ``error`` is the line of an error that the next attempt in the same ``run``
    would hit, too.
    """

    start_s: float
    end_s: float
    code: int | None = None
    machine: str
    n_cards: int
    run: str = ""
    error: str | None = None


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


def will_fail_again(log_path: str) -> bool:
    """Return whether a job's last attempt in this run had an error that would recur."""
    last, run = _read(attempts_path(Path(log_path)))[-1:], os.environ.get(RUN, "")
    return any(attempt.error and attempt.run == run for attempt in last)


def find_final_error(logs: Path) -> str | None:
    """Return the error that a job hit since this attempt began and would hit again, if any."""
    start_s = float(_environment.get(START, 0))
    last = [attempt for path in logs.rglob(f"*.{ATTEMPTS}") for attempt in _read(path)[-1:]]
    return next((one.error for one in last if one.error and one.start_s >= start_s), None)


@contextmanager
def record_attempt() -> Iterator[None]:
    """Record the block as an attempt of the job that the environment names, if any.

    Snakemake retries a job after any error. If the last error would recur, this attempt exits at
    once with the same line, and nothing is recorded.
    """
    log_path, n_cards = os.environ.pop(LOG, None), int(os.environ.pop(CARDS, "0"))
    is_retry = int(os.environ.pop(ATTEMPT, "1")) > 1
    if log_path is None:
        yield
        return
    path, now_s = attempts_path(Path(log_path)), time.time()
    earlier = _read(path)
    # The job had succeeded and runs again: its attempts are counted from here.
    if earlier and earlier[-1].code == 0:
        earlier = ()
    run = os.environ.get(RUN, "")
    if is_retry and earlier and earlier[-1].run == run and earlier[-1].error:
        sys.exit(earlier[-1].error)
    start_s = float(os.environ.pop(START, now_s - process_age_s()))
    # On several machines, and under a launcher, only the first process records.
    if {os.environ.get(name, "0") for name in ("SLURM_PROCID", "RANK")} != {"0"}:
        yield
        return
    if earlier and earlier[-1].start_s == start_s:
        # This attempt's own entry, from before the launcher.
        earlier = earlier[:-1]
    _environment.update({LOG: log_path, CARDS: str(n_cards), START: repr(start_s)})
    machine = hash_host()
    attempt = Attempt(start_s=start_s, end_s=now_s, machine=machine, n_cards=n_cards, run=run)
    _write(path, (*earlier, attempt))
    is_over = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, is_over), daemon=True)
    toucher.start()
    code, message = 1, None
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        message = ended.code if isinstance(ended.code, str) else None
        raise
    finally:
        is_over.set()
        toucher.join()
        attempt = replace(attempt, end_s=time.time(), code=code, error=message)
        attempts = (*earlier, attempt)
        for state, is_done in _states.items():
            if code == 0 and state.is_dir():
                paid = _read(state / ATTEMPTS)
                attempts = paid if paid and is_done else (*paid, *attempts)
                _write(state / ATTEMPTS, attempts)
        _write(path, attempts)


def note_state(state: Path, *, is_done: bool) -> None:
    """Store this job's attempts in the state that it trains; if ``is_done``, keep those there."""
    _states[state] = is_done


def environment_of_attempt() -> dict[str, str]:
    """Return variables that let the processes replacing this one record the same attempt."""
    return dict(_environment)


def process_age_s() -> float:
    """Return the seconds since this process started, to the kernel's tick (0.01 s)."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # Field 22 is the start in ticks since boot; field 2, a name in parentheses, can be anything.
    n_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - n_ticks / os.sysconf("SC_CLK_TCK")


def hash_host() -> str:
    """Return a hash that tells machines apart without naming them."""
    host = f"{getpass.getuser()}@{platform.node()}"
    return hashlib.sha256(host.encode()).hexdigest()[:12]


def _read(path: Path) -> tuple[Attempt, ...]:
    try:
        return read_attempts(path)
    except DataError as error:
        log.warning("%s; earlier attempts are not counted", error)
        return ()


def _write(path: Path, attempts: tuple[Attempt, ...]) -> None:
    try:
        write_sealed(path, Attempts(attempts=attempts))
    except OSError as error:
        # A job that did its work must not fail over its receipt.
        log.warning("%s: this attempt's times are not recorded (%s)", path, error)


def _touch(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(TOUCH_EVERY_S):
        try:
            os.utime(path)
        except OSError as error:
            log.warning("%s: this attempt's end may not be recorded (%s)", path, error)
            return
