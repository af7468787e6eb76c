"""The ledger's way to where the checkpoints go, and back: a lost disk keeps what was spent."""

import shutil
from pathlib import Path

from expertflow.core.files import remove
from expertflow.rental import money
from expertflow.rental.sync.store import NotThere, Store

LEDGER, PLACE = "ledger.json", "state/.guard"


class TravellingLedger:
    """The ledger here and its copy in a store, which several machines may write."""

    def __init__(self, own: Path) -> None:
        self.path = own / LEDGER
        self._pulled, self._sending = own / "pulled", own / "sending"
        self._judged = money.Ledger()
        self._begins_anew = False

    def forget(self) -> None:
        """Begin a new budget here, and with the next send in the store."""
        remove(self.path)
        self._begins_anew = True

    def pull(self, store: Store) -> None:
        """Add what the store knows of earlier sessions.

        Raises:
            SyncFailed: the store cannot be read.
            DataError: what it has is no ledger.
        """
        if not self._begins_anew:
            self._merge_from(store, self.path)
        self._judged = money.read_ledger(self.path)

    def send(self, store: Store) -> None:
        """Bring the store up to date, and keep what other machines have written there.

        Raises:
            SyncFailed: it is not there.
            DataError: what the store has is no ledger.
        """
        if not self.path.is_file():
            return
        # A copy: the ledger itself is written again while it is sent.
        self._sending.mkdir(parents=True, exist_ok=True)
        copy = self._sending / LEDGER
        try:
            shutil.copyfile(self.path, copy)
            if not self._begins_anew:
                self._merge_from(store, copy)
            store.send(self._sending, PLACE, [LEDGER])
            self._begins_anew = False
        finally:
            remove(self._sending)

    def _merge_from(self, store: Store, path: Path) -> None:
        try:
            store.fetch(f"{PLACE}/{LEDGER}", self._pulled)
            money.merge(path, self._pulled / LEDGER, judged=self._judged)
        except NotThere:
            # No machine has sent one yet.
            return
        finally:
            remove(self._pulled)
