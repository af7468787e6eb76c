"""Keep copies of training states elsewhere, so that a lost disk costs minutes.

Below a destination:

    state/{expert}/{fingerprint}/step-00000040/…       the newest complete checkpoint, the logs
    state/{expert}/{fingerprint}/step-00000040.json    what is in it, with hashes; written last
    state/{expert}/{fingerprint}/finished/…            a trained model and all its results need

A push without its .json is one that was broken off, and counts for nothing.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertflow.core.files import link_or_copy, remove, sha256_file
from expertflow.core.records import Record, write_record
from expertflow.rental.sync.records import SendRecord
from expertflow.rental.sync.store import Store, SyncFailed, files_below
from expertflow.train.saved import checkpoint_files

log = logging.getLogger(__name__)
FINISHED, KEPT = "finished", 2
# What the trainer leaves when it is done; before that it is no model to take over.
OUTCOME, FINAL, CHECKPOINTS, LOCK = "outcome.json", "final", "checkpoints", "lock"
N_TRIES = 3


class FileRecord(Record, frozen=True, kw_only=True):
    """Size and hash of a file."""

    n_bytes: int
    sha256: str


class PushRecord(Record, frozen=True, kw_only=True):
    """What a push holds, by relative name."""

    name: str
    files: dict[str, FileRecord]


def states_below(root: Path) -> list[Path]:
    """List the training states; what begins with a dot is something else."""
    return sorted(
        state
        for expert in root.glob("[!.]*")
        for state in expert.glob("[!.]*")
        if state.is_dir() and not state.name.endswith(".partial")
    )


def name_of(state: Path) -> str | None:
    """Name what a state has to lose: its newest checkpoint, its model, or nothing yet.

    Names sort by how far they are.
    """
    if (state / OUTCOME).is_file() and (state / FINAL).is_dir():
        return FINISHED
    newest = checkpoint_files.newest(state)
    return None if newest is None else newest.name


def is_further(name: str | None, other: str | None) -> bool:
    """Tell whether a name of a state stands for more work done than another.

    >>> is_further("finished", "step-00000040"), is_further("step-00000040", None)
    (True, True)
    """
    return rank(name) > rank(other)


def rank(name: str | None) -> tuple[bool, str]:
    """Give what names of a state are sorted by."""
    return (name == FINISHED, name or "")


def push_state(
    state: Path, store: Store, hold: Path, *, is_trusted: Callable[[str], bool] = lambda _: True
) -> SendRecord | None:
    """Copy what a state has to lose, unless it is there; keep two pushes of it.

    ``hold`` is a place on the same disk for links, which keep the trainer from taking a checkpoint
    away meanwhile. A push of a key that is not trusted is compared again, and repaired.

    Raises:
        SyncFailed: it is not all there; earlier pushes are.
    """
    place = place_of(state)
    name = name_of(state)
    if name is None:
        return None
    there = store.names(place)
    if f"{name}.json" in there and is_trusted(f"{place}/{name}"):
        return None
    start_s = time.monotonic()
    with _held(state, hold) as (name, folder, files):
        key = f"{place}/{name}"
        if f"{name}.json" in there:
            store.drop(f"{key}.json")
        sent = store.send(folder, key, files)
        if files_below(folder) != files:
            raise SyncFailed(f"{folder}: changed while it was sent; is another guard at work here?")
        record = PushRecord(name=name, files={file: record_of(folder / file) for file in files})
        write_record(hold / f"{name}.json", record)
        store.send(hold, place, [f"{name}.json"])
        (hold / f"{name}.json").unlink()
    _drop_older(store, place, [*there, f"{name}.json"], name)
    return SendRecord(
        what=key,
        n_files=sent.n_files,
        n_bytes=sent.n_bytes,
        duration_s=round(time.monotonic() - start_s, 3),
        verified=sent.verified,
    )


def place_of(state: Path) -> str:
    """Name the place of a state in a store."""
    return f"state/{state.parent.name}/{state.name}"


def record_of(path: Path) -> FileRecord:
    """Describe a file as a push does."""
    return FileRecord(n_bytes=path.stat().st_size, sha256=sha256_file(path))


def _drop_older(store: Store, place: str, names: list[str], newest: str) -> None:
    """Drop all pushes but two, and what broken-off ones left; a manifest goes before its files."""
    pushes = sorted({n.removesuffix(".json") for n in names if n.endswith(".json")}, key=rank)
    # The newest is kept whatever else is there: a run that was rolled back starts below others.
    kept = {newest, *[name for name in pushes if name != newest][-(KEPT - 1) :]}
    for name in sorted({entry.removesuffix(".json") for entry in names} - kept):
        for entry in (f"{name}.json", name):
            if entry in names:
                store.drop(f"{place}/{entry}")


@contextmanager
def _held(state: Path, hold: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Lay out what is to be pushed: links to what never changes, copies of what grows."""
    folder = hold / "files"
    for _ in range(N_TRIES):
        remove(folder)
        try:
            name, files = _lay_out(state, folder)
            break
        except FileNotFoundError as error:
            # Newer checkpoints took the place of this one meanwhile.
            log.info("%s changed while it was held (%s); again", state, error)
    else:
        raise SyncFailed(f"{state}: changes too fast to be held; push less often than it saves")
    try:
        yield name, folder, files
    finally:
        remove(folder)


def _lay_out(state: Path, folder: Path) -> tuple[str, list[str]]:
    """Link and copy into a folder; give the push's name, and what the folder has to hold."""
    name = name_of(state)
    if name is None:
        raise FileNotFoundError(f"{state}: no complete checkpoint")
    if name == FINISHED:
        kept = [state / FINAL]
    else:
        # A run that wants its best weights at the end needs that checkpoint, too.
        found = (checkpoint_files.newest(state), checkpoint_files.best(state))
        kept = [path for path in dict.fromkeys(found) if path is not None]
        name = kept[0].name
    laid = []
    for path in kept:
        if not (files := files_below(path)):
            raise FileNotFoundError(f"{path}: gone")
        for file in files:
            link_or_copy(path / file, folder / path.relative_to(state) / file)
            laid.append((path.relative_to(state) / file).as_posix())
    # The logs come after the checkpoint, so that they reach as far as it does.
    for file in files_below(state, skip=frozenset({CHECKPOINTS, FINAL, LOCK})):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(state / file, folder / file)
        laid.append(file)
    listed = files_below(folder)
    if sorted(listed) != sorted(laid):
        raise FileNotFoundError(f"{folder}: not as it was laid out")
    return name, listed
