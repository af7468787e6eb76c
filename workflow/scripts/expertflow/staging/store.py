"""Verified copies of content on a fast disk, found by key or made once for all processes.

    {scratch}/expertflow-{user id}/{key}/
        files/      the copy
        done.json   XXH3 hashes of its files
    .{key}.lock       exclusive while making or removing the copy, shared while reading it
    .{key}.*.partial  an unfinished copy

Locks are flocks, released however the process ends. ``make prune`` removes copies that no result
refers to.
"""

import hashlib
import logging
import os
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
from expertflow.core.files import remove, replacing
from expertflow.core.locks import flock, wait_for_lock
from expertflow.core.records import REPAIR, Record, read_part, write_record
from expertflow.staging.content import Content, key_of

log = logging.getLogger(__name__)

MARKER, FILES = "done.json", "files"
# Free space required, as a multiple of a copy's size.
SPACE_RESERVE = 1.1
# Another process may fail to make a copy, or ``make prune`` remove it before it is locked.
N_TRIES = 3
# Each thread reads and writes one chunk while another is hashed.
CHUNK_BYTES, N_THREADS = 4 << 20, 4
T = TypeVar("T")


class CopyCancelled(Exception):
    """Another file could not be copied, so this one is not needed."""


class Copy(Record, frozen=True, kw_only=True):
    """A verified copy, kept until ``hold`` is closed; ``seconds`` is null for an existing one."""

    folder: Path
    seconds: float | None
    hold: IO[str]


def ensure_staged(content: Content, root: Path) -> Copy:
    """Find or make a copy, once for all processes; raise HardwareError, OSError or DataError."""
    folder, seconds = root / content.key, None
    with ExitStack() as unless_used:
        lock = unless_used.enter_context((root / f".{content.key}.lock").open("a"))
        # The system may delete old files.
        os.utime(lock.fileno())
        for _ in range(N_TRIES):
            # Exclusive: nobody reads or makes it.
            is_checked = flock(lock)
            if is_checked and not _is_intact(folder):
                start_s = time.perf_counter()
                _make(content, root)
                seconds = time.perf_counter() - start_s
            wait_for_lock(lock, f"{folder}: another process is copying it", shared=True)
            # Between the two locks it may have been removed.
            if (folder / MARKER).is_file():
                if not is_checked and not _is_intact(folder):
                    raise HardwareError(f"{folder} is damaged and another process is reading it")
                unless_used.pop_all()
                return Copy(folder=folder / FILES, seconds=seconds, hold=lock)
    raise HardwareError(f"{folder} was removed or not completed {N_TRIES} times in a row")


def open_store(scratch: Path) -> Path:
    """Open or make this user's store; raise HardwareError if others may write there."""
    # Per user, so that users of a shared disk do not lock each other out.
    root = scratch / f"expertflow-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise HardwareError(f"{root} is not a directory that only you can write to")
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
        key = lock_path.name.removeprefix(".").removesuffix(".lock")
        places = {lock_path.with_name(key), *lock_path.parent.glob(f".{key}*.partial")} - copies
        old = sorted(path for path in places if path.exists())
        with lock_path.open("a") as lock:
            if old and flock(lock):
                removed += old
                for path in old if not dry_run else ():
                    remove(path)
    return removed


def _is_intact(folder: Path) -> bool:
    try:
        expected = read_part(dict[str, str], folder / MARKER, "files")
        return hash_files(folder / FILES, list(expected)) == expected
    except (DataError, OSError):
        return False


def _make(content: Content, root: Path) -> None:
    folder = root / content.key
    if folder.exists():
        log.warning("%s: damaged; copying again", folder)
        # The new copy may need its space.
        remove(folder)
    names = sorted(content.sizes, key=content.sizes.__getitem__, reverse=True)
    with replacing(folder) as partial:
        needs = [(root, content.n_bytes * SPACE_RESERVE, f"a copy of the {content.kind}")]
        check_space(needs, fix="make prune removes old copies")
        copy = partial / FILES
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
        hashes = _map_files(lambda n, stop: _copy_file(content.source / n, copy / n, stop), names)
        xxh3s, sha256s = ({n: pair[i] for n, pair in sorted(hashes.items())} for i in (0, 1))
        if key_of(content.kind, sha256s) != content.key:
            raise DataError(
                f"{content.source}: its files are not the recorded {content.kind}; {REPAIR}"
            )
        write_record(partial / MARKER, {"files": xxh3s})
        if not _is_intact(partial):
            raise HardwareError(f"{folder}: the copy differs from {content.source}; check the disk")


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


def _copy_file(source: Path, target: Path, stop: Event) -> tuple[str, str]:
    """Copy a file; return its XXH3 and SHA-256."""
    fast, exact, pending = xxhash.xxh3_128(), hashlib.sha256(), None
    # SHA-256 is the slowest part by far, so it has its own thread.
    with ThreadPoolExecutor(1) as hasher, target.open("xb") as out:
        for chunk in _read_chunks(source, stop):
            if pending is not None:
                pending.result()
            pending = hasher.submit(exact.update, chunk)
            fast.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
        # Makes verification read the disk, not the page cache.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return fast.hexdigest(), exact.hexdigest()


def _read_chunks(path: Path, stop: Event) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            if stop.is_set():
                raise CopyCancelled
            yield chunk
