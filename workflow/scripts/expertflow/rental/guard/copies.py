"""The guard's copies: checkpoints while the command runs, everything when it has ended."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from expertflow.core.errors import ConfigError, DataError, ExpertflowError
from expertflow.core.files import remove
from expertflow.rental.guard.ledger import TravellingLedger
from expertflow.rental.guard.published import published_below, weights_of
from expertflow.rental.sync import pull as sync_pull
from expertflow.rental.sync import push as sync_push
from expertflow.rental.sync.open import open_store
from expertflow.rental.sync.records import SendRecord
from expertflow.rental.sync.store import SyncFailed, files_below
from expertflow.train.saved import checkpoint_files

log = logging.getLogger(__name__)
HOLD = "hold"
FIRST_WAIT_S = 5.0


class Copies:
    """All that is copied to one run's destinations, and what came of it.

    ``cancel`` breaks off what is under way. Destinations may be null.
    """

    def __init__(
        self,
        *,
        state: Path,
        results: Path,
        push: str | None,
        sync_to: str | None,
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self.cancel = threading.Event()
        self.state, self.results, self.skip = state, results, skip
        self.own = state / ".guard"
        self.sync_store = None if sync_to is None else open_store(sync_to, self.cancel)
        # Checkpoints go where results go, unless they have a place of their own.
        self.push_store = self.sync_store if push is None else open_store(push, self.cancel)
        self.pulls: list[str] = []
        self.pushes: list[SendRecord] = []
        self.syncs: list[SendRecord] = []
        self.failures: list[str] = []
        self._ledger = TravellingLedger(self.own)
        self._published_before: frozenset[str] = frozenset()
        # Pushes that this session made; all there are, once it has compared them.
        self._trusted: set[str] = set()
        self._has_compared = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._pushing: Future[None] | None = None

    def begin(self, *, forget_spent: bool) -> None:
        """Bring back what earlier sessions spent, on this machine and on others.

        Raises:
            ConfigError: the destination cannot be read.
        """
        remove(self.own / HOLD)
        self._published_before = self._published()
        if forget_spent:
            self._ledger.forget()
        if self.push_store is not None:
            with _nothing_started():
                self._ledger.pull(self.push_store)

    def pull(self) -> None:
        """Bring back training states that are further elsewhere.

        Raises:
            ConfigError: the destination cannot be read.
        """
        self._has_compared = True
        if self.push_store is not None:
            with _nothing_started():
                wait = self.cancel.wait
                self.pulls = sync_pull.pull_states(self.state, self.push_store, wait=wait)
        for line in self.pulls:
            log.info("pulled %s", line)

    def try_out(self) -> None:
        """Send a small file and the ledger to each destination, before the command starts.

        Raises:
            ConfigError: a destination takes nothing.
        """
        probe = self.own / "destination.txt"
        self.own.mkdir(parents=True, exist_ok=True)
        probe.write_text("expertflow\n", encoding="utf-8")
        with _nothing_started():
            for store in dict.fromkeys((self.push_store, self.sync_store)):
                if store is not None:
                    store.send(self.own, "state/.guard", [probe.name])
            self.send_ledger()

    def send_ledger(self) -> None:
        """Copy what was spent to where checkpoints go.

        Raises:
            SyncFailed: it is not there.
        """
        if self.push_store is not None:
            try:
                self._ledger.send(self.push_store)
            except (DataError, OSError) as error:
                raise SyncFailed(f"{self._ledger.path}: not sent: {error}") from error

    def push_soon(self) -> None:
        """Push beside the command, unless a push is under way."""
        self.look_after()
        if self._pushing is None:
            self._pushing = self._thread.submit(self._push_all)

    def look_after(self) -> None:
        """Note what the push that ended has come to; a failed one is repeated when due."""
        if self._pushing is not None and self._pushing.done():
            error = self._pushing.exception()
            self._pushing = None
            if error is not None:
                # Of whatever kind: a training goes on without its copies.
                self._note_failure(f"push: {error or type(error).__name__}", error)

    def break_off(self) -> None:
        """End a push that is under way; the one before it stays whole."""
        self.cancel.set()
        self._thread.shutdown()
        self.look_after()
        self.cancel.clear()

    def _push_all(self, left_out: frozenset[str] | None = None) -> None:
        """Copy the ledger and all states, as far as that goes; the first failure is raised last.

        Raises:
            SyncFailed: it is not all there.
        """
        left_out = self._published_before if left_out is None else left_out
        tasks = [self.send_ledger]
        tasks += [partial(self._push, state) for state in self._unsaved(left_out)]
        _do_all(tasks)

    def _push(self, state: Path) -> None:
        if self.push_store is None:
            return
        trusted = self._trusted
        is_trusted = (lambda _: True) if self._has_compared else trusted.__contains__
        try:
            hold = self.own / HOLD
            record = sync_push.push_state(state, self.push_store, hold, is_trusted=is_trusted)
        except (DataError, OSError) as error:
            raise SyncFailed(f"checkpoints of {state}: {error}") from error
        if record is not None:
            trusted.add(record.what)
            self.pushes.append(record)
            log.info("pushed %s: %d bytes in %.1f s", *_told(record))

    def _unsaved(self, left_out: frozenset[str]) -> list[Path]:
        """List states that have something to lose: all but those whose weights are left out."""
        found = sync_push.states_below(self.state)
        return [state for state in found if weights_of(state / sync_push.OUTCOME) not in left_out]

    def _published(self) -> frozenset[str]:
        """List the hashes of weights that the results hold; none where results are not copied."""
        return frozenset() if self.sync_store is None else published_below(self.results)

    def send_results(self) -> None:
        """Copy and verify the results.

        Raises:
            SyncFailed: they are not all there, or there are none.
        """
        store, start_s = self.sync_store, time.monotonic()
        if store is None:
            return
        try:
            names = files_below(self.results, skip=self.skip)
            if not names:
                raise SyncFailed(
                    f"nothing below {self.results} to copy; give --results and --state, the folders"
                    " that the command writes"
                )
            sent = store.send(self.results, "results", names)
        except OSError as error:
            raise SyncFailed(f"{self.results}: not copied: {error}") from error
        record = SendRecord(
            what="results",
            n_files=sent.n_files,
            n_bytes=sent.n_bytes,
            duration_s=round(time.monotonic() - start_s, 3),
            verified=sent.verified,
        )
        self.syncs.append(record)
        log.info("synced %s: %d bytes in %.1f s", *_told(record))

    def send_all(self) -> None:
        """Copy what is to outlive the machine, as far as that goes.

        Raises:
            SyncFailed: it is not all there.
        """
        _do_all([lambda: self._push_all(self._published()), self.send_results])

    def send_with_retries(self, *, n_retries: int, may_go_on: Callable[[float], bool]) -> bool:
        """Copy all, again and again with longer waits; tell whether it is there."""
        wait_s = FIRST_WAIT_S
        for attempt in range(n_retries + 1):
            try:
                self.send_all()
                return True
            except SyncFailed as error:
                self._note_failure(f"sync: {error}")
            if attempt == n_retries or not may_go_on(wait_s):
                break
            log.warning("trying again in %.0f s", wait_s)
            self.cancel.wait(wait_s)
            wait_s *= 2
        return False

    def _note_failure(self, message: str, error: BaseException | None = None) -> None:
        self.failures.append(" ".join(message.split()))
        expected = error is None or isinstance(error, ExpertflowError)
        log.error("%s", self.failures[-1], exc_info=None if expected else error)

    def n_unsent_bytes(self) -> int:
        """Give about how much the last copy would have to move."""
        if self.push_store is None:
            return 0
        n_sent = sum(record.n_bytes for record in self.syncs)
        n_results = 0
        if self.sync_store is not None:
            names = files_below(self.results, skip=self.skip)
            n_results = sum((self.results / name).stat().st_size for name in names)
        unsaved = self._unsaved(self._published())
        newest = [checkpoint_files.newest(state) for state in unsaved]
        n_states = sum(checkpoint_files.n_bytes(path) for path in newest if path is not None)
        return max(0, n_results - n_sent) + n_states

    def bytes_per_s(self) -> float:
        """Give the speed of the copies so far; 0 where there were none."""
        done = [record for record in (*self.pushes, *self.syncs) if record.n_bytes]
        duration_s = sum(record.duration_s for record in done)
        return sum(record.n_bytes for record in done) / duration_s if duration_s else 0.0

    def save_s(self) -> float:
        """Give the longest that a trainer waited for a checkpoint; 0 where none is known."""
        longest = 0.0
        for state in self._unsaved(self._published()):
            newest = checkpoint_files.newest(state)
            if newest is not None:
                points = checkpoint_files.read_progress(newest).get("save_points", [])
                longest = max([longest, *(point["save_s"] for point in points)])
        return longest


def _do_all(tasks: Iterable[Callable[[], None]]) -> None:
    """Do each, whatever comes of the others; raise the first failure in the end."""
    failures = []
    for task in tasks:
        try:
            task()
        except (SyncFailed, OSError) as error:
            failures.append(SyncFailed(str(error)))
    for other in failures[1:]:
        log.error("%s", other)
    if failures:
        raise failures[0]


@contextmanager
def _nothing_started() -> Iterator[None]:
    try:
        yield
    except (SyncFailed, OSError) as error:
        raise ConfigError(f"{error}; nothing was started") from error


def _told(record: SendRecord) -> tuple[str, int, float]:
    return record.what, record.n_bytes, record.duration_s
