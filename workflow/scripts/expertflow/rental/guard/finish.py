"""What follows a guarded command: copy and verify, write the record, then stop the machine."""

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping

from msgspec import field

from expertflow.core.process import SIGNALS, kill_group
from expertflow.core.records import Record, write_record
from expertflow.rental.guard.session import Cause, Outcome, Session
from expertflow.rental.sync.store import SendRecord, SyncFailed

log = logging.getLogger(__name__)
RECORD = "guard.json"
# Distinct from what commands and Snakemake end with.
EXIT_CODES: dict[str, int] = {"budget": 80, "idle": 81, "stalled": 82, "notice": 83}
NOT_SYNCED, NOT_STOPPED = 84, 85
# Whoever stops a run by hand, or takes its machine away, does not want the machine stopped by us.
NO_HOOK = ("signal", "notice")
N_HOOKS, HOOK_WAIT_S, HOOK_LIMIT_S = 3, 3.0, 120.0
# As of timeout(1).
TIMED_OUT = 124


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


class Finish:
    def __init__(
        self, session: Session, *, cause: Cause | None, code: int, idle_timer: str
    ) -> None:
        self._session, self._code, self._idle_timer = session, code, idle_timer
        self._cause = cause
        # A run that came to its end although it was told to stop is finished.
        own: Outcome = "finished" if code == 0 else "failed"
        self._outcome: Outcome = own if cause is None or code == 0 else cause.outcome
        words = f"the command ended with exit code {code}"
        self._why = words if cause is None else f"{cause.why}; {words}"
        self._hook = "not asked for"

    def run(self) -> int:
        self._session.copies.break_off()
        for number in SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, self._break_off)
        noted = self._session.note()
        synced = self._send() and noted
        hook = self._session.settings.on_finish
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
        if self._outcome == "signal":
            return 128 + self._session.signals[0]
        return self._exit_code()

    def _exit_code(self) -> int:
        return EXIT_CODES.get(self._outcome, self._code)

    def _break_off(self, number: int, _: object) -> None:
        """End copies that are under way: the next signal, or the machine's end, is near."""
        self._session.add_signal(number)
        if not self._session.is_echo:
            self._session.copies.cancel.set()

    def _send(self) -> bool:
        copies, settings = self._session.copies, self._session.settings
        if copies.push_store is None:
            return True
        hurried = self._cause is not None and self._cause.outcome in NO_HOOK
        return copies.send_with_retries(
            n_retries=0 if hurried else settings.sync_retries,
            may_go_on=self._may_go_on,
        )

    def _may_go_on(self, wait_s: float) -> bool:
        """Return whether the budget and the user leave time for another try.

        What is to be stopped after the copy is paid for without it, whatever the budget.
        """
        if self._session.copies.cancel.is_set():
            return False
        stops = self._session.settings.on_finish is not None
        return stops or self._session.has_usd_for(wait_s)

    def _refusal(self, synced: bool) -> str | None:
        """Return why the stop command must not run, if so."""
        if not synced:
            return "not run: the results are not known to be anywhere else"
        if self._cause is not None and self._cause.outcome in NO_HOOK:
            return f"not run after a {self._cause.outcome}"
        if self._session.signals:
            return "not run: a signal came"
        return None

    def _run_hook(self, command: str) -> str:
        usd = self._session.usd()
        environment = {
            "EXPERTFLOW_OUTCOME": self._outcome,
            "EXPERTFLOW_USD": "" if usd is None else f"{usd:.4f}",
            # Snakemake ends with 1 when it is stopped, which looks like a failed run.
            "EXPERTFLOW_EXIT_CODE": str(self._exit_code()),
        }
        for attempt in range(1, N_HOOKS + 1):
            code = run_hook(command, environment)
            if code == 0:
                return "run, exit code 0"
            log.error("the stop command ended with exit code %d", code)
            if attempt < N_HOOKS:
                time.sleep(HOOK_WAIT_S)
            if self._session.signals:
                return f"failed, exit code {code}; not tried again, as a signal came"
        return f"failed {N_HOOKS} times, exit code {code}"

    def _write_record(self, *, send: bool = True) -> bool:
        """Write guard.json, and send it after the results; return whether that went well."""
        session = self._session
        noted = session.note()
        path = session.settings.results / RECORD
        try:
            write_record(path, self._record())
        except OSError as error:
            log.error("%s could not be written: %s", path, error)
            return False
        store = session.copies.sync_store
        if store is None or not send:
            return noted
        try:
            store.send(path.parent, "results", [RECORD])
        except SyncFailed as error:
            log.error("sync: %s", error)
            return False
        return noted

    def _record(self) -> GuardRecord:
        session, settings, meter = self._session, self._session.settings, self._session.meter
        usd = self._session.usd()
        unavailable = {}
        if usd is None:
            unavailable = dict.fromkeys(("usd_per_hour", "usd_before", "usd"), "no --usd-per-hour")
        if settings.max_usd is None:
            unavailable["max_usd"] = "no --max-usd"
        return GuardRecord(
            outcome=self._outcome,
            why=self._why,
            exit_code=self._code,
            started_at=session.started_at,
            elapsed_s=round(session.elapsed_s, 3),
            usd_per_hour=settings.usd_per_hour,
            usd_before=None if meter is None else round(meter.usd_before, 4),
            # Rounded up: what is told is not less than what is paid.
            usd=None if usd is None else math.ceil(usd * 1e4) / 1e4,
            max_usd=settings.max_usd,
            signals=tuple(signal.Signals(number).name for number in session.signals),
            idle_timer=self._idle_timer,
            pulls=tuple(session.copies.pulls),
            pushes=tuple(session.copies.pushes),
            syncs=tuple(session.copies.syncs),
            failures=tuple(session.copies.failures),
            on_finish=self._hook,
            unavailable=unavailable,
        )

    def _log_outcome(self, synced: bool) -> None:
        session, usd = self._session, self._session.usd()
        money = "dollars unknown without --usd-per-hour" if usd is None else f"${usd:.2f} spent"
        if usd is not None and session.settings.max_usd is not None:
            money += f" of ${session.settings.max_usd:.2f}"
        if not synced:
            log.error("NOT SYNCED: this machine holds what is nowhere else, and is still paid for")
        if self._hook.startswith("failed"):
            log.error("NOT STOPPED: the stop command %s; the machine is still paid for", self._hook)
        log.warning(
            "%s after %.0f s, %s; %s; stop command %s",
            self._outcome, session.elapsed_s, money, self._why, self._hook,
        )  # fmt: skip


def run_hook(command: str, environment: Mapping[str, str], *, limit_s: float = HOOK_LIMIT_S) -> int:
    """Run a shell command that is never shown; its output goes where the guard's goes.

    One that does not end is killed with all of its group, and counts as failed.
    """
    own = {**os.environ, **environment}
    process = subprocess.Popen(command, shell=True, env=own, start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    log.error("the stop command did not end within %.0f s", limit_s)
    kill_group(process)
    return TIMED_OUT
