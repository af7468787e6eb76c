"""Write checkpoints beside the training, one at a time.

The trainer takes a snapshot (``checkpoint.take``) and hands it over. Call ``wait`` before the next
snapshot is taken, so that the host holds one of them and not two.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from expertflow.train.saved.checkpoint import Snapshot, write
from expertflow.train.saved.checkpoint_files import n_bytes

log = logging.getLogger(__name__)


class Saver:
    """A thread that writes snapshots.

    ``written_s``: seconds of writing in the background. ``n_bytes``: size of the last checkpoint.
    An error of the thread is raised, as what it was, by the next ``submit`` or ``wait``.
    """

    def __init__(self, state: Path, keep: int) -> None:
        self._state = state
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._writing: Future[None] | None = None
        self.written_s = 0.0
        self.n_bytes: int | None = None

    def submit(self, snapshot: Snapshot) -> None:
        self.wait()
        self._writing = self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, snapshot: Snapshot) -> None:
        start = time.perf_counter()
        written = write(self._state, snapshot, keep=self._keep)
        self.written_s += time.perf_counter() - start
        self.n_bytes = n_bytes(written)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
            # The block's own error is the one to see; the thread's is logged.
            elif self._writing is not None and (failure := self._writing.exception()):
                log.error("the last checkpoint was not written: %s", failure)
        finally:
            self._thread.shutdown()
