"""Verified copies of content on a fast disk, found by key or made once for all processes.

    {scratch}/expertflow-{user id}/{key}/
        files/      the copy
        done.json   sizes and hashes of its files, written last
    .{key}.lock     exclusive while making or removing the copy, shared while reading it
    .{key}.partial  an unfinished copy

A copy counts only with its ``done.json``. Locks are flocks, released however the process
ends. ``make prune`` removes copies that no result refers to.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import IO, Any, TypeVar

import xxhash

from expertflow.core.disk import check_space
from expertflow.core.errors import DataError, HardwareError
from expertflow.core.files import remove, sync_directory
from expertflow.core.locks import flock, wait_for_lock
from expertflow.core.records import REPAIR, Record, read_part, read_record, write_record
from expertflow.staging.content import Content, key_of

log = logging.getLogger(__name__)

MARKER, FILES = "done.json", "files"
# Free space required, as a multiple of a copy's size.
SPACE_RESERVE = 1.1
# Attempts to replace a damaged copy before giving up on the disk.
N_TRIES = 3
# Others may be verifying a damaged copy; training holds it longer than this.
PATIENCE_S, PAUSE_S = 30.0, 0.05
# Each thread reads and writes one chunk while another is hashed.
CHUNK_BYTES, N_THREADS = 4 << 20, 4
T = TypeVar("T")


class NotStagedError(Exception):
    """A copy cannot be made here; the source is read in place."""


class CopyCancelled(Exception):
    """Another file could not be copied, so this one is not needed."""


class FileHashes(Record, frozen=True, kw_only=True):
    n_bytes: int
    xxh3_128: str
    sha256: str


class Marker(Record, frozen=True, kw_only=True):
    """The contents of a complete copy. ``id`` distinguishes successive copies of a key."""

    id: str
    files: dict[str, FileHashes]


class Copy(Record, frozen=True, kw_only=True):
    """A verified copy, kept until ``hold`` is closed; ``seconds`` is null for an existing one."""

    folder: Path
    seconds: float | None
    hold: IO[str]


def ensure_staged(content: Content, root: Path, *, patience_s: float = PATIENCE_S) -> Copy:
    """Find or make a copy, once for all processes; raise NotStagedError, OSError or DataError."""
    folder, made, bad, seconds, n_made, waited_s = root / content.key, None, None, None, 0, 0.0
    with ExitStack() as unless_used:
        lock = unless_used.enter_context((root / f".{content.key}.lock").open("a"))
        # The system may delete old files.
        os.utime(lock.fileno())
        while True:
            wait_for_lock(lock, f"{folder}: another process is copying it", shared=True)
            marker = _find(folder)
            if marker is not None and marker.id != bad:
                # This process has verified its own copy already.
                if marker.id == made or _is_intact(folder / FILES, marker):
                    unless_used.pop_all()
                    return Copy(folder=folder / FILES, seconds=seconds, hold=lock)
                log.warning("%s: damaged; copying again", folder)
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
                raise NotStagedError(f"{folder} is damaged and another process is reading it")
            else:
                time.sleep(PAUSE_S)
                waited_s += PAUSE_S


def open_store(scratch: Path) -> Path:
    """Open or make this user's store; raise NotStagedError if others may write there."""
    # Per user, so that users of a shared disk do not lock each other out.
    root = scratch / f"expertflow-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NotStagedError(f"{root} is not a directory that only you can write to")
    return root


def prune_copies(results: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove and return copies that no expert's staging refers to and nobody reads."""
    records = sorted(results.glob("*/staging.json"))
    # Only these keys, because a record may be from an earlier version.
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


def _find(folder: Path) -> Marker | None:
    """Return a copy's marker; null if it or a file is missing, damaged or truncated."""
    try:
        marker = read_record(Marker, folder / MARKER)
        files = marker.files.items()
        is_complete = all((folder / FILES / n).stat().st_size == f.n_bytes for n, f in files)
    except (DataError, OSError):
        return None
    return marker if is_complete else None


def _is_intact(folder: Path, marker: Marker) -> bool:
    expected = {name: file.xxh3_128 for name, file in marker.files.items()}
    try:
        return hash_files(folder, list(expected)) == expected
    except OSError as error:
        log.warning("%s: cannot be read (%s)", folder, error.strerror)
        return False


def _make(content: Content, root: Path) -> Marker:
    folder, partial = root / content.key, root / f".{content.key}.partial"
    # The marker first, because it makes the copy count.
    for path in (folder / MARKER, folder, partial):
        remove(path)
    try:
        needs = [(root, content.n_bytes * SPACE_RESERVE, f"a copy of the {content.kind}")]
        check_space(needs, fix="make prune removes old copies")
    except HardwareError as error:
        raise NotStagedError(str(error)) from error
    names = sorted(content.sizes, key=content.sizes.__getitem__, reverse=True)
    try:
        hashes = _copy_files(content.source, partial / FILES, names)
        if key_of(content.kind, {name: h.sha256 for name, h in hashes.items()}) != content.key:
            raise DataError(
                f"{content.source}: its files are not the recorded {content.kind}; {REPAIR}"
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
        # A complete copy has been renamed by now.
        remove(partial)


def _copy_files(source: Path, target: Path, names: list[str]) -> dict[str, FileHashes]:
    folders = {(target / name).parent for name in names} | {target}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    hashes = _map_files(lambda name, stop: _copy_file(source / name, target / name, stop), names)
    for folder in folders:
        sync_directory(folder)
    return hashes


def hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    """Hash files by 128-bit XXH3."""

    def hash_file(name: str, stop: Event) -> str:
        digest = xxhash.xxh3_128()
        for chunk in _read_chunks(folder / name, stop):
            digest.update(chunk)
        return digest.hexdigest()

    return _map_files(hash_file, names)


def _map_files(work: Callable[[str, Event], T], names: list[str]) -> dict[str, T]:
    """Run ``work`` for each name in a few threads; the first failure stops the others."""
    stop = Event()
    with ThreadPoolExecutor(N_THREADS) as pool:
        futures = {name: pool.submit(work, name, stop) for name in names}
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return {name: future.result() for name, future in futures.items()}
        finally:
            # Also if a signal handler raises while this waits.
            stop.set()
            pool.shutdown(cancel_futures=True)


def _copy_file(source: Path, target: Path, stop: Event) -> FileHashes:
    fast, exact, n_bytes, pending = xxhash.xxh3_128(), hashlib.sha256(), 0, None
    # SHA-256 is the slowest part by far, so it has its own thread.
    with ThreadPoolExecutor(1) as hasher, target.open("xb") as out:
        for chunk in _read_chunks(source, stop):
            if pending is not None:
                pending.result()
            pending = hasher.submit(exact.update, chunk)
            fast.update(chunk)
            n_bytes += out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
        # Makes verification read the disk, not the page cache.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return FileHashes(n_bytes=n_bytes, xxh3_128=fast.hexdigest(), sha256=exact.hexdigest())


def _read_chunks(path: Path, stop: Event) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            if stop.is_set():
                raise CopyCancelled
            yield chunk
