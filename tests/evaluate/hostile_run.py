"""Score hostile predictions and detect harm to files, processes, the network and secrets."""

import ctypes
import hashlib
import os
import socket
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
from hostile_predictions import records
from made_up_documents import spec
from support import is_running

from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import find_task

SECRET = "a-secret-of-the-environment-5d1f"
PR_SET_CHILD_SUBREAPER = 36


class Surroundings:
    """What a prediction could harm, recorded beforehand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = folder / "canary"
        self.canary.write_text("untouched")
        self.database = folder / "shop.db"
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("CREATE TABLE item (id, name)")
            connection.executemany("INSERT INTO item VALUES (?, ?)", [(1, "a"), (2, "b")])
        os.environ["EXPERTFLOW_HOSTILE_SECRET"] = SECRET
        # Processes that earlier tests left running are not counted.
        self._before = {process.pid for process in psutil.Process().children()}
        _adopt_orphans(True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._files = self._hashes()

    def close(self) -> None:
        self._listener.close()
        del os.environ["EXPERTFLOW_HOSTILE_SECRET"]
        # Later tests wait until processes are gone, so adopted zombies are reaped.
        _adopt_orphans(False)
        for process in psutil.Process().children():
            if not is_running(process) and process.pid not in self._before:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def harm(self, verdict: Judgment) -> list[str]:
        found = []
        if self._hashes() != self._files:
            found.append("files changed")
        if children := _descendants_after_a_while(self._before):
            found.append(f"processes left: {children}")
        try:
            self._listener.accept()[0].close()
            found.append("the network was reached")
        except BlockingIOError:
            pass
        if SECRET in verdict.detail:
            found.append("the environment was read")
        return found

    def _hashes(self) -> dict[str, str]:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def score_all(task: str, predictions: Sequence[str], around: Surroundings) -> list[Judgment]:
    record: dict[str, Any] = records(str(around.database))[task]
    scorer = find_task(record.get("task", task))
    assert scorer is not None
    fields, artifacts = record.get("fields", {}), record.get("artifacts", {})
    made = scorer(spec(fields=fields, artifacts=artifacts, allow_code_execution=True))
    example = Example(
        document_id="d0", prompt="?", reference=record["reference"], fields=record.get("record", {})
    )
    return made.score([example] * len(predictions), predictions)


def _adopt_orphans(adopts: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _descendants_after_a_while(spared: Collection[int]) -> list[int]:
    """Wait until all descendants have ended; the kernel takes a moment to kill."""
    deadline = time.monotonic() + 60
    while (left := _descendants(spared)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _descendants(spared: Collection[int]) -> list[int]:
    """Return living descendants, without ``spared`` children and their descendants."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in spared:
            with suppress(psutil.NoSuchProcess):
                found += [child, *child.children(recursive=True)]
    return [process.pid for process in found if is_running(process)]
