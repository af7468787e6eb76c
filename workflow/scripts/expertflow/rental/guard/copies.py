"""The guard's copies: checkpoints while the command runs, everything once it has ended."""

import logging
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from expertflow.core.errors import ConfigError
from expertflow.core.files import remove
from expertflow.core.records import write_sealed
from expertflow.plan.records import Ledger
from expertflow.rental.guard.ledger import LEDGER, merge_ledgers, read_ledger
from expertflow.rental.sync.states import FINISHED, key_of, pull_states, push_state, states_below
from expertflow.rental.sync.store import (
    NotThere,
    SendRecord,
    SyncFailed,
    convert_errors,
    files_below,
)
from expertflow.rental.sync.stores import open_store
from expertflow.train.saved import checkpoint_files

log = logging.getLogger(__name__)
HOLD, PLACE, SENT = "hold", "state/.guard", "%s %s: %d bytes in %.1f s"
# Over 20 minutes: a machine that nobody stops is paid for until somebody looks.
N_RETRIES, FIRST_WAIT_S, LONGEST_WAIT_S = 20, 5.0, 80.0
# At least this long is reserved for the last save and copies.
RESERVE_S = 60.0
# Transfers may take longer than the last ones: networks vary.
MARGIN = 1.5
# Assumed until a copy has been measured: what networks of rented machines commonly reach.
UNMEASURED_BYTES_PER_S = 100e6


class Copies:
    """All copies to one run's destinations, which may be null; ``cancel`` interrupts transfers.

    A failure raises ConfigError before the command starts; later it is noted.
    ``starts_nothing``: without the command or an earlier session, there is nothing to copy.
    """

    starts_nothing = False

    def __init__(self, options: Namespace) -> None:
        self.cancel = threading.Event()
        self.state, self.results = options.state, options.results
        self.own = self.state / ".guard"
        push, sync_to = options.push, options.sync_to
        self.sync_store = None if sync_to is None else open_store(sync_to, self.cancel)
        # Checkpoints go where results go, unless they have their own destination.
        self.push_store = self.sync_store if push is None else open_store(push, self.cancel)
        # While the command runs; its cost is sent even if checkpoints are not.
        send_ledger = partial(self.attempt, "push", self.send_ledger)
        self._periodic_copy = send_ledger if push is None else self._push_all
        self.pulls: list[str] = []
        self.pushes: list[SendRecord] = []
        self.syncs: list[SendRecord] = []
        self.failures: list[str] = []
        self._ledger = self.own / LEDGER
        # As it was when this session's meter started.
        self._judged = Ledger()
        self._is_fresh = self._is_reset = False
        # Pushes from this session; null (all are trusted) once existing ones were compared.
        self._trusted: set[str] | None = set()
        # One thread: concurrent pushes would share the folder for a checkpoint.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._pushing: Future[bool] | None = None

    def start_session(self, *, forget_spent: bool) -> None:
        remove(self.own / HOLD)
        self._is_fresh = not self._ledger.is_file()
        self._is_reset = forget_spent
        if forget_spent:
            remove(self._ledger)
        if self.push_store is not None:
            with _nothing_started():
                if not forget_spent and (joined := self._join_ledgers()).sessions:
                    write_sealed(self._ledger, joined)
                self._judged = read_ledger(self._ledger)

    def pull_states(self) -> None:
        self._trusted = None
        if self.push_store is not None:
            with _nothing_started():
                self.pulls = pull_states(self.state, self.push_store, wait=self.cancel.wait)
        for line in self.pulls:
            log.info("pulled %s", line)

    def try_destinations(self) -> None:
        probe = self.own / "destination.txt"
        probe.write_text("expertflow\n", encoding="utf-8")
        with _nothing_started():
            # Often the same store.
            for store in dict.fromkeys((self.push_store, self.sync_store)):
                if store is not None:
                    store.send_files(self.own, PLACE, [probe.name])
            self.send_ledger()

    def send_ledger(self) -> None:
        """Send the cost so far, keeping what other machines have sent, unless it was reset."""
        if self.push_store is None or not self._ledger.is_file():
            return
        with convert_errors(f"{self._ledger}: not sent"), TemporaryDirectory() as folder:
            # Send a copy: the ledger itself is rewritten meanwhile.
            joined = read_ledger(self._ledger) if self._is_reset else self._join_ledgers()
            write_sealed(Path(folder, LEDGER), joined)
            self.push_store.send_files(Path(folder), PLACE, [LEDGER])
            self._is_reset = False

    def _join_ledgers(self) -> Ledger:
        assert self.push_store is not None
        mine = read_ledger(self._ledger)
        # If it is missing, no machine has sent one yet.
        with TemporaryDirectory() as folder, suppress(NotThere):
            self.push_store.fetch(f"{PLACE}/{LEDGER}", Path(folder))
            return merge_ledgers(mine, read_ledger(Path(folder, LEDGER)), judged=self._judged)
        return mine

    def push_soon(self) -> None:
        if self._pushing is None or self._pushing.done():
            self._pushing = self._thread.submit(self._periodic_copy)

    def break_off(self) -> None:
        """Cancel a push in progress; the previous one stays intact."""
        self.cancel.set()
        self._thread.shutdown()
        self.cancel.clear()

    def send_with_retries(self, *, n_retries: int, may_go_on: Callable[[float], bool]) -> bool:
        """Copy everything, retrying with longer waits; return whether that succeeded."""
        for attempt in range(n_retries + 1):
            if self.send_all():
                return True
            wait_s = retry_wait_s(attempt)
            # Time does not fill empty results.
            is_last = attempt == n_retries or not any(self.results.glob("*"))
            if is_last or not may_go_on(wait_s):
                break
            log.warning("trying again in %.0f s", wait_s)
            # Not sleep: a signal ends the wait.
            self.cancel.wait(wait_s)
        return False

    def send_all(self) -> bool:
        pushed = self._push_all()
        return self.attempt("sync", self._send_results) and pushed

    def _push_all(self) -> bool:
        """Send the ledger, then each state, published or not: a pull restores only states."""
        states: list[Path] = []
        sent = self.attempt("push", self.send_ledger)
        sent &= self.attempt("push", lambda: states.extend(states_below(self.state)))
        for state in states:
            sent &= self.attempt("push", partial(self._push, state))
        return sent

    def attempt(self, what: str, task: Callable[[], object]) -> bool:
        """Run a copy; note any failure, which delays neither other copies nor the training."""
        try:
            with convert_errors("a copy"):
                task()
        except SyncFailed as error:
            # File names need not be UTF-8; the record must be.
            text = f"{what}: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
            self.failures.append(" ".join(text.split()))
            log.error("%s", self.failures[-1])
            return False
        return True

    def _push(self, state: Path) -> None:
        assert self.push_store is not None
        with convert_errors(f"checkpoints of {state}"):
            record = push_state(state, self.push_store, self.own / HOLD, trusted=self._trusted)
        if record is not None:
            if self._trusted is not None:
                self._trusted.add(record.what)
            self.pushes.append(record)
            log.info(SENT, "pushed", record.what, record.n_bytes, record.duration_s)

    def _send_results(self) -> None:
        if self.sync_store is None:
            return
        with convert_errors(f"{self.results}: not copied"):
            names = self._list_results()
            if not names and self.starts_nothing and self._is_fresh:
                return
            if not names:
                raise SyncFailed(
                    f"nothing in {self.results} to copy; set --results and --state to the folders"
                    " that the command writes"
                )
            record = self.sync_store.send_files(self.results, "results", names)
        self.syncs.append(record)
        log.info(SENT, "synced", record.what, record.n_bytes, record.duration_s)

    def _list_results(self) -> list[str]:
        # The weights of a base model from elsewhere are links; its record has their hash.
        return [
            name
            for name in files_below(self.results)
            if Path(name).parent.name != "base_model" or not (self.results / name).is_symlink()
        ]

    def reserve_s(self) -> float:
        """Return the seconds to reserve for the last save and copies, from measurements so far."""
        sent = {record.what for record in self.pushes}
        states = (s for s in states_below(self.state) if f"{key_of(s)}/{FINISHED}" not in sent)
        found = map(checkpoint_files.newest_checkpoint, states)
        newest = [path for path in found if path is not None]
        progresses = map(checkpoint_files.read_progress, newest)
        points = (point for progress in progresses for point in progress.get("save_points", []))
        save_s, n_unsent = max((point["save_s"] for point in points), default=0.0), 0
        if self.sync_store is not None:
            n_unsent = sum((self.results / name).stat().st_size for name in self._list_results())
        if self.push_store is not None:
            n_unsent += sum(map(checkpoint_files.n_bytes, newest))
        n_sent = sum(record.n_bytes for record in self.pushes)
        duration_s = sum(record.duration_s for record in self.pushes)
        s_per_byte = duration_s / n_sent if n_sent else 1 / UNMEASURED_BYTES_PER_S
        return max(RESERVE_S, MARGIN * (save_s + n_unsent * s_per_byte))


def retry_wait_s(n_tries: int) -> float:
    """Return 5, 10, 20, 40, 80, 80, … seconds."""
    return min(FIRST_WAIT_S * 2.0**n_tries, LONGEST_WAIT_S)


@contextmanager
def _nothing_started() -> Iterator[None]:
    try:
        yield
    except (SyncFailed, OSError) as error:
        raise ConfigError(f"{error}; nothing was started") from error
