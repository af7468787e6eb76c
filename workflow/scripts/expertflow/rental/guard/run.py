"""Guard a command on a rented machine: stop it in time, save its output, then stop paying."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from expertflow.core.files import remove
from expertflow.core.process import SIGNALS
from expertflow.rental.guard.options import Settings
from expertflow.rental.guard.session import RECORD, Cause, Outcome, Session
from expertflow.rental.guard.supervisor import KILLED_S, Supervisor
from expertflow.rental.guard.timers import IdleGpu, Notice, Stalled
from expertflow.rental.sync.store import SyncFailed

log = logging.getLogger(__name__)
NAP_S, REMIND_S = 0.1, 1.0
# The supervisor gives up before the guard does.
MARGIN_S = 10.0
NOTE_EVERY_S, ESTIMATE_EVERY_S = 10.0, 30.0
Timers = dict[Outcome, Callable[[], str | None]]


class Guard:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.session = Session(settings)
        self.copies, self.signals = self.session.copies, self.session.signals
        self._noted_s = self._pushed_s = time.monotonic()
        self._estimated_s = -ESTIMATE_EVERY_S
        self._reserve_s = settings.reserve_s

    def run(self) -> int:
        for number in SIGNALS:
            # Under nohup the guard keeps ignoring signals, to outlive its terminal.
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGTERM:
                signal.signal(number, self.session.on_signal)
        with self.session.locked():
            self._begin()
            return self._run()

    def _begin(self) -> None:
        """Do everything that may refuse to start; the meter runs once the ledger is known."""
        self.copies.begin(forget_spent=self.settings.forget_spent)
        self.session.start_meter()
        if self.settings.pull:
            with self.session.within_budget("states were pulled"):
                self.copies.pull()
        self.copies.try_out()
        remove(self.settings.results / RECORD)
        self.session.may_cancel = False

    def _run(self) -> int:
        settings = self.settings
        with ExitStack() as stack:
            # Before any thread starts: the supervisor is a fork of this process.
            supervisor = Supervisor(settings.command, grace_s=settings.grace_s)
            notice = Notice(settings.notice_command)
            stack.callback(notice.close)
            idle = IdleGpu(stack, minutes=settings.idle_minutes, busy_percent=settings.idle_percent)
            log.info("idle timer %s", idle.state)
            folders = (settings.results, settings.state, settings.results.parent / ".snakemake/log")
            still = Stalled(minutes=settings.stalled_minutes, folders=folders, pid=supervisor.pid)
            # Checked in this order for a reason to stop.
            timers: Timers = {
                "signal": lambda: signal.Signals(self.signals[0]).name if self.signals else None,
                "notice": notice.poll,
                "budget": self._over_budget,
                "idle": idle.poll,
                "stalled": still.poll,
            }
            fault = "the guard itself failed, see its log"
            cause: Cause | None = Cause(outcome="failed", why=fault, grace_s=settings.grace_s)
            try:
                cause = self._watch(supervisor, timers)
            finally:
                # Even if watching failed, the output is saved and sent.
                code = self._stop(supervisor, cause) if cause else _ended(supervisor)
                notice.close()
                exit_code = self.session.finish(cause, code=code, idle_timer=idle.state)
        return exit_code

    def _watch(self, supervisor: Supervisor, timers: Timers) -> Cause | None:
        settings = self.settings
        while supervisor.poll() is None:
            for outcome, ask in timers.items():
                if (why := ask()) is not None:
                    grace_s = settings.notice_s if outcome == "notice" else settings.grace_s
                    return Cause(outcome=outcome, why=why, grace_s=grace_s)
            now_s = time.monotonic()
            if now_s - self._noted_s >= NOTE_EVERY_S:
                self._noted_s = now_s
                self.session.note()
            if settings.push is not None:
                self.copies.check_push()
                if now_s - self._pushed_s >= 60 * settings.push_minutes:
                    self._pushed_s = now_s
                    self.copies.push_soon()
            time.sleep(NAP_S)
        return None

    def _over_budget(self) -> str | None:
        if time.monotonic() - self._estimated_s >= ESTIMATE_EVERY_S:
            self._estimated_s = time.monotonic()
            try:
                self._reserve_s = self.copies.reserve_s(self.settings.reserve_s)
            except (OSError, SyncFailed) as error:
                log.warning("the reserve stays %.0f s: %s", self._reserve_s, error)
        if self.session.has_usd_for(self._reserve_s):
            return None
        spent, limit, reserve_s = self.session.usd(), self.settings.max_usd, self._reserve_s
        return f"${spent:.2f} of ${limit:.2f} spent, {reserve_s:.0f} s kept for save and sync"

    def _stop(self, supervisor: Supervisor, cause: Cause) -> int:
        """Have the command save and exit; kill it after the grace or a repeated signal."""
        log.warning("stopping, %s: %s", cause.outcome, cause.why)
        begun_s, told_s = time.monotonic(), 0.0
        while (code := supervisor.poll()) is None:
            now_s = time.monotonic()
            if now_s - begun_s > cause.grace_s or self.session.is_insisted:
                log.warning("not at its end after %.1f s: killed", now_s - begun_s)
                supervisor.kill()
                return _ended(supervisor)
            if now_s - told_s > REMIND_S:
                told_s = now_s
                supervisor.stop()
            time.sleep(NAP_S)
        log.info("the command ended %.1f s later", time.monotonic() - begun_s)
        return code


def _ended(supervisor: Supervisor) -> int:
    deadline_s = time.monotonic() + KILLED_S + MARGIN_S
    while (code := supervisor.poll()) is None:
        if time.monotonic() > deadline_s:
            log.error("killed and still there: process %d and below; going on", supervisor.pid)
            return 128 + signal.SIGKILL
        time.sleep(NAP_S)
    return code
