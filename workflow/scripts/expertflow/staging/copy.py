"""Copy files side by side, hashing them on the way."""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import TypeVar

import xxhash

from expertflow.core.files import sync_directory
from expertflow.core.records import Record

# Two buffers a thread: one is read and written while the other is hashed.
CHUNK_BYTES, N_THREADS = 4 << 20, 4
T = TypeVar("T")


class FileHashes(Record, frozen=True, kw_only=True):
    """Size and hashes of a source file, as it was read while it was copied."""

    n_bytes: int
    xxh3_128: str
    sha256: str


class Stopped(Exception):
    """Another file could not be copied, so this one need not be."""


def copy_files(source: Path, target: Path, names: list[str]) -> dict[str, FileHashes]:
    """Copy files below ``target``, flushed; return the hashes of what the source holds.

    Raises:
        OSError: a file cannot be read or written; what was begun is left there.
    """
    folders = {(target / name).parent for name in names} | {target}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    hashes = _map_files(lambda name, stop: _copy_file(source / name, target / name, stop), names)
    for folder in folders:
        sync_directory(folder)
    return hashes


def hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    """Hash files as they are now, by XXH3 with 128 bits.

    Raises:
        OSError: one cannot be read.
    """
    return _map_files(lambda name, stop: _hash_file(folder / name, stop), names)


def _map_files(work: Callable[[str, Event], T], names: list[str]) -> dict[str, T]:
    """Run ``work`` for each name, a few at a time; the first failure stops the others."""
    stop = Event()
    with ThreadPoolExecutor(N_THREADS) as pool:
        futures = {name: pool.submit(work, name, stop) for name in names}
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return {name: future.result() for name, future in futures.items()}
        finally:
            # Also where a signal's handler raises while this waits.
            stop.set()
            pool.shutdown(cancel_futures=True)


def _copy_file(source: Path, target: Path, stop: Event) -> FileHashes:
    fast, exact, n_bytes = xxhash.xxh3_128(), hashlib.sha256(), 0
    # SHA-256 is the slowest part by far, so it has a thread of its own.
    with ThreadPoolExecutor(1) as hasher, target.open("xb", buffering=0) as out:
        pending = None
        for chunk in _read_chunks(source, stop):
            if pending is not None:
                pending.result()
            pending = hasher.submit(exact.update, chunk)
            fast.update(chunk)
            n_bytes += len(chunk)
            _write(out.fileno(), chunk)
        os.fsync(out.fileno())
        # So that a comparison reads the disk, and not what was just written to memory.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return FileHashes(n_bytes=n_bytes, xxh3_128=fast.hexdigest(), sha256=exact.hexdigest())


def _hash_file(path: Path, stop: Event) -> str:
    digest = xxhash.xxh3_128()
    for chunk in _read_chunks(path, stop):
        digest.update(chunk)
    return digest.hexdigest()


def _read_chunks(path: Path, stop: Event) -> Iterator[memoryview]:
    """Yield a file's bytes; a chunk is good until the next but one is asked for."""
    buffers = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(2)]
    turn = 0
    with path.open("rb", buffering=0) as stream:
        while n := stream.readinto(buffers[turn]):
            if stop.is_set():
                raise Stopped
            yield buffers[turn][:n]
            turn = 1 - turn


def _write(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
