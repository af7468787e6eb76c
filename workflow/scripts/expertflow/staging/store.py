"""Verified copies of content on a fast disk: found by key, or made once for all who ask.

    {scratch}/expertflow-{user id}/{key}/
        files/      the copy
        done.json   sizes and hashes of its files, written last
    .{key}.lock     held alone by who makes or removes the copy, shared by who reads it
    .{key}.partial  a copy in the making

A copy counts only with its ``done.json``. Locks are flocks: they end with the process, however it
ends. Copies that no result refers to go with ``make prune``.
"""

import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from expertflow.core.errors import DataError
from expertflow.core.files import remove, sync_directory
from expertflow.core.format import gb
from expertflow.core.locks import flock
from expertflow.core.records import Record, read_part, read_record, write_record
from expertflow.staging.content import Content, key_of
from expertflow.staging.copy import FileHashes, copy_files, hash_files

log = logging.getLogger(__name__)

MARKER, FILES = "done.json", "files"
# A copy is made only where so much more than its size is free.
SPACE_RESERVE = 1.1
# A copy that turns out damaged is made again so often, then the disk is not trusted.
N_TRIES = 3
# Others may be verifying a damaged copy; who trains on it holds it longer than this.
PATIENCE_S, PAUSE_S = 30.0, 0.05


class NotStagedError(Exception):
    """A copy cannot be had here; what was to be copied is read where it is."""


class Marker(Record, frozen=True, kw_only=True):
    """The contents of a complete copy. ``id`` tells one copy of a key from the next."""

    id: str
    files: dict[str, FileHashes]


class Copy(Record, frozen=True, kw_only=True):
    """A verified copy, which nobody removes until ``hold`` is closed.

    ``seconds`` is the time that it took to make, null for one that was there.
    """

    folder: Path
    seconds: float | None
    hold: IO[str]


def ensure_staged(content: Content, root: Path, *, patience_s: float = PATIENCE_S) -> Copy:
    """Find a copy of content in a store, or make it, once for all who ask.

    Raises:
        NotStagedError, OSError: it cannot be had there.
        DataError: the source is not what its key says.
    """
    folder, made, bad, seconds, n_made, waited_s = root / content.key, None, None, None, 0, 0.0
    with ExitStack() as unless_used:
        lock = unless_used.enter_context(_open_lock(root, content.key))
        while True:
            if not flock(lock, shared=True):
                log.info("%s: waits for another process that copies it", folder)
                flock(lock, shared=True, wait=True)
            marker = _find(folder)
            if marker is not None and marker.id != bad:
                # What this process made it has compared already.
                if marker.id == made or _is_intact(folder / FILES, marker):
                    unless_used.pop_all()
                    return Copy(folder=folder / FILES, seconds=seconds, hold=lock)
                log.warning("%s: damaged, copied again", folder)
                bad = marker.id
            fcntl.flock(lock, fcntl.LOCK_UN)
            if flock(lock):
                marker = _find(folder)
                if marker is None or marker.id == bad:
                    if n_made == N_TRIES:
                        raise NotStagedError(f"{folder} was damaged {N_TRIES} times in a row")
                    start = time.perf_counter()
                    made = _make(content, root).id
                    seconds, n_made = time.perf_counter() - start, n_made + 1
            elif waited_s > patience_s:
                raise NotStagedError(f"{folder} is damaged and another process reads it")
            else:
                time.sleep(PAUSE_S)
                waited_s += PAUSE_S


def open_store(scratch: Path) -> Path:
    """Open this user's store below a directory, or make it; only its owner may write there.

    Raises:
        NotStagedError: it belongs to somebody else, who could put anything there.
        OSError: it cannot be made.
    """
    # By user, so that those who share a disk do not shut each other out.
    root = scratch / f"expertflow-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NotStagedError(f"{root} is not a directory that you alone may write to")
    return root


def prune_copies(results: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove copies that no expert's staging refers to, where any of them staged; return them.

    Parts that killed processes left go, too. A copy that is read or made just now stays.
    """
    records = sorted(results.glob("*/staging.json"))
    # A key alone, as a record may be of an earlier version.
    notes = [read_part(dict[str, Any], r, kind) for r in records for kind in ("rows", "weights")]
    # {scratch}/expertflow-{user id}/{key}/files
    copies = {Path(note["target"]).parent for note in notes if note.get("target")}
    removed = []
    for lock_path in (lock for root in {c.parent for c in copies} for lock in root.glob(".*.lock")):
        root, key = lock_path.parent, lock_path.name.removeprefix(".").removesuffix(".lock")
        places = {root / key, root / f".{key}.partial"} - copies
        old = sorted(path for path in places if path.exists())
        with lock_path.open("a") as lock:
            if old and flock(lock):
                removed += old
                for path in old if not dry_run else ():
                    remove(path / MARKER)
                    remove(path)
    return removed


def _open_lock(root: Path, key: str) -> IO[str]:
    stream = (root / f".{key}.lock").open("a")
    # The system may sweep away what is old.
    os.utime(stream.fileno())
    return stream


def _find(folder: Path) -> Marker | None:
    """Return the marker of a copy whose files all have the right size."""
    try:
        marker: Marker = read_record(Marker, folder / MARKER)
        sizes = {name: (folder / FILES / name).stat().st_size for name in marker.files}
    except (DataError, OSError):
        # Missing or damaged: the copy is made again.
        return None
    is_complete = all(sizes[name] == file.n_bytes for name, file in marker.files.items())
    return marker if is_complete else None


def _is_intact(folder: Path, marker: Marker) -> bool:
    try:
        found = hash_files(folder, list(marker.files))
    except OSError as error:
        log.warning("%s: cannot be read (%s)", folder, error.strerror)
        return False
    return found == {name: file.xxh3_128 for name, file in marker.files.items()}


def _make(content: Content, root: Path) -> Marker:
    """Copy, verify, and put in place; nothing is left of a copy that fails."""
    folder, partial = root / content.key, root / f".{content.key}.partial"
    # First what makes it count.
    for path in (folder / MARKER, folder, partial):
        remove(path)
    needed, free = content.n_bytes * SPACE_RESERVE, shutil.disk_usage(root).free
    if free < needed:
        raise NotStagedError(
            f"{root}: {gb(free, 2)} free, {gb(needed, 2)} needed; make prune removes old copies"
        )
    names = sorted(content.sizes, key=lambda name: -content.sizes[name])
    try:
        hashes = copy_files(content.source, partial / FILES, names)
        if key_of(content.kind, {name: h.sha256 for name, h in hashes.items()}) != content.key:
            raise DataError(
                f"{content.source}: its files are not those that were recorded as {content.kind};"
                " run the stage that wrote them again"
            )
        marker = Marker(id=secrets.token_hex(8), files=dict(sorted(hashes.items())))
        if not _is_intact(partial / FILES, marker):
            raise NotStagedError(
                f"{folder}: the copy differs from {content.source}; check the disk"
            )
        partial.rename(folder)
        sync_directory(root)
        write_record(folder / MARKER, marker)
        return marker
    finally:
        # A complete copy has another name by now.
        remove(partial)
