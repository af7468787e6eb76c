"""Have a verified copy of content in a store: found, or made once for all who ask."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from expertflow.core.errors import DataError
from expertflow.core.files import remove
from expertflow.stage.content import Content, key_of
from expertflow.stage.copy import can_share, copy_files, hash_files
from expertflow.stage.store import CopiedFile, Marker, NotStaged, Store

log = logging.getLogger(__name__)
# A copy that turns out damaged is made again so often, then the disk is not trusted.
N_TRIES = 3
# Others may be verifying a damaged copy; who trains on it holds it longer than this.
PATIENCE_S = 30.0
Origin = Literal["copied", "linked", "reused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A verified copy that nobody removes until ``hold`` is closed. ``seconds`` it took to make."""

    folder: Path
    origin: Origin
    seconds: float
    hold: IO[str]


def ensure_staged(content: Content, store: Store, *, patience_s: float = PATIENCE_S) -> Copy:
    """Have a copy of content in a store: find it whole, or make it, once for all who ask.

    Raises:
        NotStaged, OSError: it cannot be had there.
        DataError: the source is not what its key says.
    """
    damaged, start = None, time.perf_counter()
    for _ in range(N_TRIES):
        origin: Origin = "reused"
        with store.looking(content.key):
            marker = store.find(content.key)
            if marker is None or marker.id == damaged:
                store.clear(content.key, patience_s=patience_s)
                start = time.perf_counter()
                marker = _make(content, store)
                origin = marker.how
            hold = store.share(content.key)
        folder = store.files(content.key)
        with ExitStack() as unless_used:
            unless_used.callback(hold.close)
            # What this process made it has compared already.
            if origin != "reused" or _is_whole(folder, marker):
                unless_used.pop_all()
                return Copy(
                    folder=folder, origin=origin, seconds=time.perf_counter() - start, hold=hold
                )
        log.warning("%s: damaged, copied again", folder)
        damaged = marker.id
    raise NotStaged(f"{store.files(content.key)} was damaged {N_TRIES} times in a row")


def _make(content: Content, store: Store) -> Marker:
    """Copy, verify, and put in place; nothing is left of a copy that fails."""
    partial = store.partial(content.key)
    linked = content.largest.stat().st_dev == store.root.stat().st_dev
    try:
        # Tried in here, as this is removed with all that is in it, should the process be killed.
        partial.mkdir()
        linked = linked and can_share(content.largest, partial)
        folder = store.begin(content.key, 0 if linked else content.n_bytes)
        names = sorted(content.sizes, key=lambda name: -content.sizes[name])
        hashes = copy_files(content.source, folder, names, "linked" if linked else "copied")
        if key_of(content.kind, {name: h.sha256 for name, h in hashes.items()}) != content.key:
            raise DataError(
                f"{content.source}: its files are not those that were recorded as {content.kind};"
                " run the stage that wrote them again"
            )
        files = {
            name: CopiedFile(n_bytes=h.n_bytes, xxh3_128=h.xxh3_128)
            for name, h in sorted(hashes.items())
        }
        if not linked and hash_files(folder, names) != {n: f.xxh3_128 for n, f in files.items()}:
            raise NotStaged(f"{folder}: the copy differs from {content.source}; check the disk")
        return store.finish(content.key, how="linked" if linked else "copied", files=files)
    finally:
        # A copy that is whole has another name by now.
        remove(partial)


def _is_whole(folder: Path, marker: Marker) -> bool:
    try:
        found = hash_files(folder, list(marker.files))
    except OSError as error:
        log.warning("%s: cannot be read (%s)", folder, error.strerror)
        return False
    return found == {name: file.xxh3_128 for name, file in marker.files.items()}
