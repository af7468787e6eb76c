"""One guarded run; the machine stops only once copies are verified and the record is written."""

import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal

from msgspec import field

from expertflow.core.errors import ConfigError
from expertflow.core.locks import try_lock
from expertflow.core.process import kill_group
from expertflow.core.records import Record, write_record
from expertflow.rental.guard.copies import Copies
from expertflow.rental.guard.ledger import LEDGER, Meter
from expertflow.rental.guard.options import Settings
from expertflow.rental.sync.store import SendRecord, SyncFailed

log = logging.getLogger(__name__)
# A closed terminal plus a launcher that forwards signals sends one twice.
ECHO_S = 2.0
Outcome = Literal["finished", "failed", "budget", "idle", "stalled", "notice", "signal"]
RECORD = "guard.json"
# Distinct from the exit codes of commands and Snakemake.
EXIT_CODES: dict[str, int] = {"budget": 80, "idle": 81, "stalled": 82, "notice": 83}
NOT_SYNCED, NOT_STOPPED = 84, 85
NO_HOOK = ("signal", "notice")
COPIED = ("pulls", "pushes", "syncs", "failures")
N_HOOKS, HOOK_WAIT_S, HOOK_LIMIT_S = 3, 3.0, 120.0
# As in timeout(1).
TIMED_OUT = 124


class GuardRecord(Record, frozen=True, kw_only=True):
    """A guarded run. ``exit_code`` is the command's own; ``usd`` includes earlier sessions."""

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


class Cause(Record, frozen=True, kw_only=True):
    outcome: Outcome
    why: str
    grace_s: float


class Session:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.signals: list[int] = []
        self._signals_s: list[float] = []
        # Whether a signal cancels copies: nothing is worth saving yet, or this is the final copy.
        self.may_cancel = True
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.copies = Copies(settings)
        self.meter: Meter | None = None
        self._zero_s = time.monotonic()
        self._hook = "not asked for"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the guard's folder while the command runs; raise ConfigError if locked."""
        path = self.copies.own / "lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.open("a")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}); check --state"
            ) from error
        with stream:
            if try_lock(stream) == "held":
                raise ConfigError(
                    f"{path}: another guard, or what it started, is at work in this folder;"
                    " wait for it, or stop it"
                )
            yield

    def start_meter(self) -> None:
        """Count dollars if the price is known; raise ConfigError if the budget is spent."""
        settings = self.settings
        if settings.usd_per_hour is None:
            return
        self.meter = Meter(
            self.copies.own / LEDGER,
            usd_per_hour=settings.usd_per_hour,
            since_s=settings.paid_since_s,
        )
        spent, limit = self.meter.usd(), settings.max_usd
        if limit is not None and self.meter.usd(ahead_s=settings.reserve_s) >= limit:
            # The only copy of earlier results may be here, so the machine is not stopped unasked.
            paid = ""
            if settings.on_finish is not None:
                paid = "; --on-finish was not run, and this machine is still paid for"
            raise ConfigError(
                f"${spent:.2f} of ${limit:.2f} are spent, and {settings.reserve_s:g} s are kept for"
                f" save and sync{paid}; raise --max-usd, or begin a new budget with --forget-spent"
            )
        self.meter.note()

    def usd(self) -> float | None:
        return None if self.meter is None else self.meter.usd()

    def has_usd_for(self, wait_s: float) -> bool:
        limit = self.settings.max_usd
        return self.meter is None or limit is None or self.meter.usd(ahead_s=wait_s) < limit

    def note(self) -> bool:
        try:
            if self.meter is not None:
                self.meter.note()
        except OSError as error:
            log.error("what is spent could not be written down: %s", error)
            return False
        return True

    def on_signal(self, number: int, _: object) -> None:
        self.signals.append(number)
        self._signals_s.append(time.monotonic())
        # A signal soon after the first is a duplicate of it.
        if self.may_cancel and (len(self.signals) == 1 or self.is_insisted):
            self.copies.cancel.set()

    @property
    def is_insisted(self) -> bool:
        """Return whether a signal was repeated later than an automatic duplicate."""
        times_s = self._signals_s
        return bool(times_s) and times_s[-1] - times_s[0] >= ECHO_S

    @contextmanager
    def within_budget(self, what: str) -> Iterator[None]:
        """Interrupt copies and raise ConfigError when only the budget's reserve is left."""
        meter, limit, reserve_s = self.meter, self.settings.max_usd, self.settings.reserve_s
        if meter is None or limit is None:
            yield
            return
        spent = threading.Event()

        def break_off() -> None:
            spent.set()
            self.copies.cancel.set()

        timer = threading.Timer(meter.lasts_s(limit) - reserve_s, break_off)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self.note()
            if spent.is_set():
                self.copies.cancel.clear()
                with suppress(SyncFailed):
                    # A fresh machine would pay for the same again.
                    self.copies.send_ledger()
                raise ConfigError(
                    f"${meter.usd():.2f} of ${limit:.2f} were spent while {what}; nothing was"
                    " started; raise --max-usd"
                )

    def finish(self, cause: Cause | None, *, code: int, idle_timer: str) -> int:
        """Copy and verify, write the record, run the stop command; return the guard's exit code.

        ``code`` is the command's own; 0 counts as finished even if the command was told to stop.
        """
        self._code, self._idle_timer = code, idle_timer
        self._outcome = "finished" if code == 0 else cause.outcome if cause else "failed"
        words = f"the command ended with exit code {code}"
        self._why = f"{cause.why}; {words}" if cause else words
        # Whoever stops a run by hand, or reclaims its machine, does not want the stop command.
        self._hurried = cause.outcome if cause and cause.outcome in NO_HOOK else None
        self.copies.break_off()
        self.may_cancel = True
        synced = self.note()
        if self.copies.push_store is not None:
            n_retries = 0 if self._hurried else self.settings.sync_retries
            synced &= self.copies.send_with_retries(n_retries=n_retries, may_go_on=self._may_go_on)
        hook = self.settings.on_finish
        if hook is not None:
            self._hook = self._refusal(synced) or "due"
        synced = self._write_record() and synced
        if self._hook == "due":
            self._hook = self._refusal(synced) or self._run_hook(hook or "")
            self._write_record(send=False)
        self._log_outcome(synced)
        if not synced:
            return NOT_SYNCED
        if self._hook.startswith("failed"):
            return NOT_STOPPED
        return 128 + self.signals[0] if self._outcome == "signal" else self._exit_code()

    def _exit_code(self) -> int:
        return EXIT_CODES.get(self._outcome, self._code)

    def _may_go_on(self, wait_s: float) -> bool:
        # With --on-finish the machine is paid for until the copy succeeds, whatever the budget.
        has_usd = self.settings.on_finish is not None or self.has_usd_for(wait_s)
        return has_usd and not self.copies.cancel.is_set()

    def _refusal(self, synced: bool) -> str | None:
        if not synced:
            return "not run: the results are not known to be anywhere else"
        if self._hurried is not None:
            return f"not run after a {self._hurried}"
        return "not run: a signal came" if self.signals else None

    def _run_hook(self, command: str) -> str:
        usd = self.usd()
        environment = {
            "EXPERTFLOW_OUTCOME": self._outcome,
            "EXPERTFLOW_USD": "" if usd is None else f"{usd:.4f}",
            # A stopped Snakemake exits with 1, which looks like a failed run.
            "EXPERTFLOW_EXIT_CODE": str(self._exit_code()),
        }
        for attempt in range(1, N_HOOKS + 1):
            code = run_hook(command, environment)
            if code == 0:
                return "run, exit code 0"
            log.error("the stop command ended with exit code %d", code)
            if attempt < N_HOOKS:
                time.sleep(HOOK_WAIT_S)
            if self.signals:
                return f"failed, exit code {code}; not tried again, as a signal came"
        return f"failed {N_HOOKS} times, exit code {code}"

    def _write_record(self, *, send: bool = True) -> bool:
        noted = self.note()
        path = self.settings.results / RECORD
        try:
            write_record(path, self._record())
            if send and self.copies.sync_store is not None:
                self.copies.sync_store.send(path.parent, "results", [RECORD])
        except SyncFailed as error:
            log.error("sync: %s", error)
            return False
        except OSError as error:
            log.error("%s could not be written: %s", path, error)
            return False
        return noted

    def _record(self) -> GuardRecord:
        settings, meter, copies, usd = self.settings, self.meter, self.copies, self.usd()
        unavailable = {}
        if usd is None:
            unavailable = dict.fromkeys(("usd_per_hour", "usd_before", "usd"), "no --usd-per-hour")
        if settings.max_usd is None:
            unavailable["max_usd"] = "no --max-usd"
        return GuardRecord(
            outcome=self._outcome,
            why=self._why,
            exit_code=self._code,
            started_at=self.started_at,
            elapsed_s=round(time.monotonic() - self._zero_s, 3),
            usd_per_hour=settings.usd_per_hour,
            usd_before=None if meter is None else round(meter.usd_before, 4),
            # Rounded up: never report less than was paid.
            usd=None if usd is None else math.ceil(usd * 1e4) / 1e4,
            max_usd=settings.max_usd,
            signals=tuple(signal.Signals(number).name for number in self.signals),
            idle_timer=self._idle_timer,
            **{name: tuple(getattr(copies, name)) for name in COPIED},
            on_finish=self._hook,
            unavailable=unavailable,
        )

    def _log_outcome(self, synced: bool) -> None:
        usd = self.usd()
        money = "dollars unknown without --usd-per-hour" if usd is None else f"${usd:.2f} spent"
        if usd is not None and self.settings.max_usd is not None:
            money += f" of ${self.settings.max_usd:.2f}"
        if not synced:
            log.error("NOT SYNCED: this machine holds what is nowhere else, and is still paid for")
        if self._hook.startswith("failed"):
            log.error("NOT STOPPED: the stop command %s; the machine is still paid for", self._hook)
        elapsed_s = time.monotonic() - self._zero_s
        log.warning(
            "%s after %.0f s, %s; %s; stop command %s",
            self._outcome, elapsed_s, money, self._why, self._hook,
        )  # fmt: skip


def run_hook(command: str, environment: Mapping[str, str], *, limit_s: float = HOOK_LIMIT_S) -> int:
    """Run a shell command without displaying it; one that times out is killed and has failed."""
    own = {**os.environ, **environment}
    process = subprocess.Popen(command, shell=True, env=own, start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    log.error("the stop command did not end within %.0f s", limit_s)
    kill_group(process)
    return TIMED_OUT
