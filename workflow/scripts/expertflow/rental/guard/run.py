"""Guard a command on a rented machine: stop it in time, save its output, then stop paying."""

import logging
import math
import os
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal

from expertflow.core.errors import ConfigError, ExpertflowError
from expertflow.core.files import remove
from expertflow.core.locks import try_lock
from expertflow.core.process import SIGNALS, kill_group
from expertflow.core.records import write_record
from expertflow.rental.guard.copies import N_RETRIES, RESERVE_S, Copies, retry_wait_s
from expertflow.rental.guard.ledger import LEDGER, BudgetSpent, Meter
from expertflow.rental.guard.supervisor import Supervisor
from expertflow.rental.guard.timers import IdleGpu, Notice, Standstill
from expertflow.rental.sync.store import SyncFailed

log = logging.getLogger(__name__)
NAP_S, REMIND_S = 0.1, 1.0
NOTE_EVERY_S, ESTIMATE_EVERY_S = 10.0, 30.0
# A closed terminal plus a launcher that forwards signals sends one twice.
ECHO_S = 2.0
RECORD = "guard.json"
# Distinct from the exit codes of commands and Snakemake.
EXIT_CODES: dict[str, int] = {"budget": 80, "idle": 81, "stalled": 82, "notice": 83}
NOT_SYNCED, NOT_STOPPED = 84, 85
# No stop command if a run is stopped by hand, or its machine is reclaimed.
NO_HOOK = ("signal", "notice")
N_HOOKS, HOOK_LIMIT_S = 8, 120.0
# As in timeout(1) and shells.
TIMED_OUT, NOT_STARTED = 124, 126
Outcome = Literal["finished", "failed", "budget", "idle", "stalled", "notice", "signal"]
# What stopped a run, and the details.
Cause = tuple[Outcome, str]


class Guard:
    """One guarded run; ``meter`` exists once it has started, the record once it has ended."""

    meter: Meter
    _record: dict[str, Any]

    def __init__(self, options: Namespace) -> None:
        self.options, self.copies = options, Copies(options)
        self.signals: list[int] = []
        self._signals_s: list[float] = []
        # Whether a signal cancels copies: nothing is worth saving yet, or this is the final copy.
        self._may_cancel = True
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._zero_s = self._noted_s = self._pushed_s = time.monotonic()
        # Long ago, so that the first budget check measures.
        self._estimated_s, self._reserve_s = -ESTIMATE_EVERY_S, RESERVE_S

    def run(self) -> int:
        for number in SIGNALS:
            # Under nohup the guard keeps ignoring signals, to outlive its terminal.
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGTERM:
                signal.signal(number, self._on_signal)
        # A launcher may ignore it; then the command's exit code would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with self._lock_folder():
            # Everything that may prevent the start; the meter runs once the ledger is known.
            self.copies.start_session(forget_spent=self.options.forget_spent)
            try:
                self.start_meter()
                # Before the pull, which may take long.
                self.copies.try_destinations()
                if self.options.pull:
                    self.pull_states()
            except BudgetSpent as spent:
                if self.options.on_finish is None:
                    raise
                if not isinstance(spent.__context__, ExpertflowError | None):
                    log.error("unexpected error in the pull", exc_info=spent.__context__)
                # Earlier sessions may have left results here, and the machine costs money anyway.
                log.warning("the command is not started: %s", spent)
                self.copies.starts_nothing = True
                cause: Cause = ("budget", str(spent))
                return self._finish(cause, code=None, idle_timer="off: no command")
            remove(self.options.results / RECORD)
            self._may_cancel = False
            return self._run()

    def _on_signal(self, number: int, _: object) -> None:
        self.signals.append(number)
        self._signals_s.append(time.monotonic())
        # A signal soon after the first is a duplicate of it.
        if self._may_cancel and (len(self.signals) == 1 or self._is_insisted):
            self.copies.cancel.set()

    @property
    def _is_insisted(self) -> bool:
        """Return whether a signal was repeated later than an automatic duplicate."""
        times_s = self._signals_s
        return bool(times_s) and times_s[-1] - times_s[0] >= ECHO_S

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
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
                    f"{path}: another guard, or what it started, is running in this folder;"
                    " wait for it, or stop it"
                )
            yield

    def start_meter(self) -> None:
        """Count dollars if the price is known; raise BudgetSpent if none are left."""
        options = self.options
        self.meter = Meter(
            self.copies.own / LEDGER,
            usd_per_hour=options.usd_per_hour,
            max_usd=options.max_usd,
            since_s=options.paid_since_s,
        )
        if not self.meter.has_usd_for(RESERVE_S):
            fix = "raise --max-usd"
            if self.meter.has_usd_for(RESERVE_S, forgets=True):
                fix += ", or start a new budget with --forget-spent"
            usd = RESERVE_S / 3600 * options.usd_per_hour
            reserve = f"{RESERVE_S:g} s (${usd:.2f}) reserved for save and sync"
            raise BudgetSpent(f"{self.meter.format_usd()} spent, and {reserve}; {fix}")
        self.meter.write_ledger()

    def pull_states(self) -> None:
        """Pull states; raise BudgetSpent once only the budget's reserve is left."""
        timer = threading.Timer(self.meter.lasts_s(RESERVE_S), self.copies.cancel.set)
        timer.daemon = True
        timer.start()
        try:
            self.copies.pull_states()
        finally:
            # Joined, so that it cannot cancel a copy that begins later.
            timer.cancel()
            timer.join()
            self._note()
            if not self.meter.has_usd_for(RESERVE_S):
                self.copies.cancel.clear()
                # A fresh machine would pay for the same again.
                self.copies.attempt("push", self.copies.send_ledger)
                message = "spent while states were pulled; nothing was started; raise --max-usd"
                raise BudgetSpent(f"{self.meter.format_usd()} {message}")

    def _note(self) -> bool:
        try:
            self.meter.write_ledger()
        except OSError as error:
            log.error("the ledger could not be written: %s", error)
            return False
        return True

    def _run(self) -> int:
        options = self.options
        # Before any thread starts: the supervisor is a fork of this process.
        supervisor = Supervisor(options.command, grace_s=options.grace_seconds)
        notice, idle, code = Notice(options.notice_command), None, os.EX_SOFTWARE
        cause: Cause | None = ("failed", "the guard itself failed, see its log")
        with ExitStack() as stack:
            try:
                idle = IdleGpu(stack, minutes=options.idle_minutes)
                log.info("idle timer %s", idle.state)
                logs = options.results.parent / ".snakemake/log"
                still = Standstill(
                    minutes=options.stalled_minutes,
                    folders=(options.results, options.state, logs),
                    pid=supervisor.pid,
                )
                # Checked in this order for a reason to stop.
                timers: dict[Outcome, Callable[[], str | None]] = {
                    "signal": lambda: (
                        signal.Signals(self.signals[0]).name if self.signals else None
                    ),
                    "notice": notice.poll,
                    "budget": self._over_budget,
                    "idle": idle.poll,
                    "stalled": still.poll,
                }
                cause = self._watch(supervisor, timers)
            finally:
                # Whatever failed, the output is saved and sent, and the machine is stopped.
                try:
                    code = self._stop(supervisor, cause) if cause else supervisor.wait()
                    notice.close()
                finally:
                    idle_timer = "off: it did not start" if idle is None else idle.state
                    exit_code = self._finish(cause, code=code, idle_timer=idle_timer)
        return exit_code

    def _watch(
        self, supervisor: Supervisor, timers: Mapping[Outcome, Callable[[], str | None]]
    ) -> Cause | None:
        options = self.options
        while supervisor.poll() is None:
            for outcome, ask in timers.items():
                if (why := ask()) is not None:
                    return outcome, why
            now_s = time.monotonic()
            if now_s - self._noted_s >= NOTE_EVERY_S:
                self._noted_s = now_s
                self._note()
            if self.copies.push_store and now_s - self._pushed_s >= 60 * options.push_minutes:
                self._pushed_s = now_s
                self.copies.push_soon()
            time.sleep(NAP_S)
        return None

    def _over_budget(self) -> str | None:
        if time.monotonic() - self._estimated_s >= ESTIMATE_EVERY_S:
            self._estimated_s = time.monotonic()
            try:
                self._reserve_s = self.copies.reserve_s()
            except (OSError, SyncFailed) as error:
                log.warning("the reserve stays %.0f s: %s", self._reserve_s, error)
        if self.meter.has_usd_for(self._reserve_s):
            return None
        return (
            f"{self.meter.format_usd()} spent, {self._reserve_s:.0f} s reserved for save and sync"
        )

    def _stop(self, supervisor: Supervisor, cause: Cause) -> int:
        """Have the command save and exit; kill it after the grace period or a repeated signal."""
        log.warning("stopping, %s: %s", *cause)
        begun_s, signaled_s = time.monotonic(), 0.0
        while (code := supervisor.poll()) is None:
            now_s = time.monotonic()
            if now_s - begun_s > self.options.grace_seconds or self._is_insisted:
                log.warning("still running after %.1f s: killed", now_s - begun_s)
                supervisor.kill()
                return supervisor.wait()
            # Again and again: a process that has just started may not handle the signal yet.
            if now_s - signaled_s > REMIND_S:
                signaled_s = now_s
                supervisor.stop()
            time.sleep(NAP_S)
        log.info("the command ended %.1f s later", time.monotonic() - begun_s)
        return code

    def _finish(self, cause: Cause | None, *, code: int | None, idle_timer: str) -> int:
        """Copy, write the record, run the stop command; return the guard's exit code."""
        outcome: Outcome = "finished" if code == 0 else cause[0] if cause else "failed"
        ended = "was not started" if code is None else f"ended with exit code {code}"
        words = f"the command {ended}"
        price, limit = self.options.usd_per_hour, self.options.max_usd
        unpriced = ("usd_per_hour", "usd_before", "usd") if price is None else ()
        self._record = {
            "outcome": outcome,
            "why": f"{cause[1]}; {words}" if cause else words,
            # The command's own.
            "exit_code": code,
            "started_at": self._started_at,
            "usd_per_hour": price,
            "usd_before": None if price is None else round(self.meter.usd_before, 4),
            "max_usd": limit,
            "idle_timer": idle_timer,
            "unavailable": dict.fromkeys(unpriced, "no --usd-per-hour")
            | ({"max_usd": "no --max-usd"} if limit is None else {})
            | ({"exit_code": words} if code is None else {}),
        }
        hurried = cause[0] if cause and cause[0] in NO_HOOK else None
        # The command's own, if it ended by itself.
        exit_code = EXIT_CODES.get(outcome, code or 0)
        self.copies.break_off()
        self._may_cancel = True
        synced = self._note()
        if self.copies.push_store is not None:
            n_retries = 0 if hurried else N_RETRIES
            synced &= self.copies.send_with_retries(n_retries=n_retries, may_go_on=self._may_go_on)
        hook = self.options.on_finish
        refusal = "not requested" if hook is None else self._refusal(synced, hurried)
        # Sent before the hook runs, because the machine may be gone after it.
        synced = self._write_record(refusal or "pending") and synced
        if refusal is None:
            refusal = self._refusal(synced, hurried)
            self._write_record(refusal or self._run_hook(hook, exit_code), send=False)
        is_stopped = not self._record["on_finish"].startswith("failed")
        self._log_outcome(synced=synced, is_stopped=is_stopped)
        if not synced or not is_stopped:
            return NOT_STOPPED if synced else NOT_SYNCED
        return 128 + self.signals[0] if outcome == "signal" else exit_code

    def _may_go_on(self, wait_s: float) -> bool:
        # With --on-finish the machine is paid for until the copy succeeds, whatever the budget.
        has_usd = self.options.on_finish is not None or self.meter.has_usd_for(wait_s)
        return has_usd and not self.copies.cancel.is_set()

    def _refusal(self, synced: bool, hurried: Outcome | None) -> str | None:
        if not synced:
            return "not run: the results may exist nowhere else"
        if hurried is not None:
            return f"not run after a {hurried}"
        return "not run: a signal arrived" if self.signals else None

    def _run_hook(self, command: str, exit_code: int) -> str:
        usd = self.meter.total_usd()
        environment = {
            "EXPERTFLOW_OUTCOME": self._record["outcome"],
            "EXPERTFLOW_USD": "" if usd is None else f"{usd:.4f}",
            # A stopped Snakemake exits with 1, which looks like a failed run.
            "EXPERTFLOW_EXIT_CODE": str(exit_code),
        }
        for attempt in range(N_HOOKS):
            code = run_hook(command, environment)
            if code == 0:
                return "run, exit code 0"
            log.error("the stop command ended with exit code %d", code)
            if attempt < N_HOOKS - 1:
                self.copies.cancel.wait(retry_wait_s(attempt))
            if self.signals:
                return f"failed, exit code {code}; not retried, because a signal arrived"
        return f"failed {N_HOOKS} times, exit code {code}"

    def _write_record(self, on_finish: str, *, send: bool = True) -> bool:
        noted, usd, copies = self._note(), self.meter.total_usd(), self.copies
        self._record |= {
            "elapsed_s": round(time.monotonic() - self._zero_s, 3),
            # With earlier sessions. Rounded up: never report less than was paid.
            "usd": None if usd is None else math.ceil(usd * 1e4) / 1e4,
            "signals": [signal.Signals(number).name for number in self.signals],
            "pulls": copies.pulls,
            "pushes": copies.pushes,
            "syncs": copies.syncs,
            "failures": copies.failures,
            "on_finish": on_finish,
        }
        path = self.options.results / RECORD
        try:
            write_record(path, self._record)
        except OSError as error:
            log.error("%s could not be written: %s", path, error)
            return False
        if send and (store := copies.sync_store) is not None:
            noted &= copies.attempt(
                "sync", lambda: store.send_files(path.parent, "results", [RECORD])
            )
        return noted

    def _log_outcome(self, *, synced: bool, is_stopped: bool) -> None:
        record, usd = self._record, self.meter.total_usd()
        money = "dollars unknown without --usd-per-hour" if usd is None else f"${usd:.2f} spent"
        if usd is not None and record["max_usd"] is not None:
            money += f" of ${record['max_usd']:.2f}"
        if not synced:
            log.error("NOT SYNCED: this machine has the only copy, and still costs money")
        if not is_stopped:
            log.error(
                "NOT STOPPED: the stop command %s; the machine still costs money",
                record["on_finish"],
            )
        log.warning(
            "%s after %.0f s, %s; %s; stop command %s",
            *(record["outcome"], record["elapsed_s"], money, record["why"], record["on_finish"]),
        )


def run_hook(command: str, environment: Mapping[str, str], *, limit_s: float = HOOK_LIMIT_S) -> int:
    """Run a shell command without displaying it; after a timeout it is killed and has failed."""
    own = {**os.environ, **environment}
    try:
        process = subprocess.Popen(command, shell=True, env=own, start_new_session=True)
    except OSError as error:
        log.error("the stop command could not be started: %s", error)
        return NOT_STARTED
    with suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    log.error("the stop command did not end within %.0f s", limit_s)
    kill_group(process)
    return TIMED_OUT
