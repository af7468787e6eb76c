"""Lock directories of training states, and list those to remove."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from expertflow.core.errors import TransientError
from expertflow.core.files import PARTIAL, is_abandoned
from expertflow.core.locks import read_holder, sign_lock, try_lock
from expertflow.core.records import read_part
from expertflow.train.saved.checkpoint_files import OUTCOME

log = logging.getLogger(__name__)

LOCK_FILE = "lock"
# A stopping trainer on another machine has a step and a checkpoint to finish.
ELSEWHERE_S = 600.0
HERE_S = 24 * 3600.0
POLL_S, TOLD_EVERY_S = 0.5, 60.0


@contextmanager
def lock_state(state: Path, *, elsewhere_s: float = ELSEWHERE_S) -> Iterator[None]:
    """Lock the state directory for one trainer; the lock dies with its process.

    A killed Snakemake leaves its trainer running. Wait for one on this machine, since its results
    are worth more than a refusal; for one elsewhere only ``elsewhere_s``, as it may be cut off.
    Raises TransientError if it is still held after a day.
    """
    state.mkdir(parents=True, exist_ok=True)
    # Not "w", which would erase what its holder wrote.
    with (state / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        _wait(stream, state, elsewhere_s)
        sign_lock(stream)
        yield


def _wait(stream: IO[str], state: Path, elsewhere_s: float) -> None:
    start_s, told_s = time.monotonic(), -TOLD_EVERY_S
    while try_lock(stream) == "held":
        known = read_holder(stream)
        waited_s = time.monotonic() - start_s
        is_here = known.get("host") == socket.gethostname()
        who = f"{state}: a trainer is running there, process {known.get('pid', 'unknown')}"
        if not is_here:
            who += f" on {known.get('host', 'an unknown machine')}"
        if waited_s >= (HERE_S if is_here else elsewhere_s):
            raise TransientError(
                f"{who}, for {waited_s:.0f} s now; stop it, which saves its state, and run again to"
                " resume from there"
            )
        if waited_s - told_s >= TOLD_EVERY_S:
            log.warning("%s; waiting for it; Ctrl-C ends the wait", who)
            told_s = waited_s
        time.sleep(POLL_S)


def prunable_states(results: Path, state: Path) -> list[Path]:
    """List removable states: not published by their expert, and not in use.

    An unfinished state may be resumed, so the newest one stays.
    """
    found: list[Path] = []
    # The token store and a guard's notes next to the states have other rules.
    experts = (path for path in state.glob("[!.]*") if path.is_dir())
    for expert in sorted(experts):
        record = results / expert.name / "training.json"
        published = read_part(str, record, "fingerprint") if record.is_file() else None
        others = [path for path in expert.iterdir() if path.is_dir() and path.name != published]
        others.sort(key=lambda path: path.stat().st_mtime)
        finished = [path for path in others if (path / OUTCOME).is_file()]
        unfinished = [path for path in others if path not in finished]
        # Nothing published: a retraining failed, and the newest finished model is the last one.
        keep = unfinished[-1:] + ([] if published else finished[-1:])
        found += [path for path in others if path not in keep and not _in_use(path)]
    return found


def find_abandoned(*folders: Path) -> list[Path]:
    """List what killed jobs left half-written, except what a running trainer will remove."""
    found: list[Path] = []
    for path in sorted(path for folder in folders for path in folder.rglob(f".*{PARTIAL}")):
        states = (parent for parent in path.parents if (parent / LOCK_FILE).is_file())
        is_inside = any(path.is_relative_to(other) for other in found)
        if not is_inside and is_abandoned(path) and not any(map(_in_use, states)):
            found.append(path)
    return found


def _in_use(state: Path) -> bool:
    with (state / LOCK_FILE).open("a") as stream:
        return try_lock(stream) != "taken"
