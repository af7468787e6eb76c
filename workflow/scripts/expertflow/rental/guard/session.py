"""One guarded run: its settings, its clock, its money, its copies, and what happened to it."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal

from expertflow.core.errors import ConfigError
from expertflow.core.locks import try_lock
from expertflow.core.records import Record
from expertflow.rental.guard.copies import Copies
from expertflow.rental.guard.ledger import LEDGER, Meter
from expertflow.rental.guard.options import Settings
from expertflow.rental.sync.store import SyncFailed

log = logging.getLogger(__name__)
# A closed terminal and a launcher that passes signals on send one twice.
ECHO_S = 2.0
Outcome = Literal["finished", "failed", "budget", "idle", "stalled", "notice", "signal"]


class Cause(Record, frozen=True, kw_only=True):
    outcome: Outcome
    why: str
    grace_s: float


class Session:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.signals: list[int] = []
        self._signals_s: list[float] = []
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.copies = Copies(settings)
        self.meter: Meter | None = None
        self._zero_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._zero_s

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the guard's folder for a block, and for as long as what it started runs.

        A second guard would stop the machine under the first.

        Raises:
            ConfigError: another guard holds it.
        """
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
        """Begin to count dollars, where the price is known.

        Raises:
            ConfigError: the budget is spent.
        """
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
            # Earlier results may lie here alone, so the machine is not stopped unasked.
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
        """Write down what is spent; return whether that went well."""
        try:
            if self.meter is not None:
                self.meter.note()
        except OSError as error:
            log.error("what is spent could not be written down: %s", error)
            return False
        return True

    def add_signal(self, number: int) -> None:
        self.signals.append(number)
        self._signals_s.append(time.monotonic())

    @property
    def is_echo(self) -> bool:
        """Whether the last signal is the first one, come twice."""
        return len(self.signals) > 1 and not self.is_insisted

    @property
    def is_insisted(self) -> bool:
        """Whether a signal was repeated by somebody who had the time to wait."""
        times_s = self._signals_s
        return bool(times_s) and times_s[-1] - times_s[0] >= ECHO_S

    @contextmanager
    def within_budget(self, what: str) -> Iterator[None]:
        """Break off copies of a block when what is left of the budget is the reserve.

        Raises:
            ConfigError: it came to that.
        """
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
