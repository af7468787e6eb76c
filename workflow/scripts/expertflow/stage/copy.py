"""Copy files side by side, hashing what passes, or share their bytes on one file system."""

import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal, TypeVar

import xxhash

from expertflow.core.files import sync_directory

# Two buffers a thread: one is read and written while the other is hashed.
CHUNK_BYTES, N_THREADS = 4 << 20, 4
# ioctl of btrfs, XFS and others: let two files share blocks until one of them is written to.
FICLONE = 0x40049409
How = Literal["copied", "linked"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHashes:
    """What was read of a source file while it was copied."""

    n_bytes: int
    xxh3_128: str
    sha256: str


class Stopped(Exception):
    """Another file could not be copied, so this one need not be."""


def copy_files(source: Path, target: Path, names: list[str], how: How) -> dict[str, FileHashes]:
    """Lay files out again below ``target``, flushed; give the hashes of what the source holds.

    Raises:
        OSError: a file cannot be read or written; what was begun is left there.
    """
    for folder in {(target / name).parent for name in names}:
        folder.mkdir(parents=True, exist_ok=True)
    stop = Event()

    def one(name: str) -> FileHashes:
        here, there = source / name, target / name
        if how == "linked":
            share(here, there)
            return _pass_through(there, None, stop)
        with there.open("xb", buffering=0) as stream:
            hashes = _pass_through(here, stream.fileno(), stop)
            os.fsync(stream.fileno())
            # So that who compares reads the disk, and not what was just written to memory.
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashes

    hashes = each(one, names, stop)
    for folder in {(target / name).parent for name in names} | {target}:
        sync_directory(folder)
    return hashes


def hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    """Hash files as they are now, by XXH3 with 128 bits.

    Raises:
        OSError: one cannot be read.
    """
    stop = Event()
    return each(lambda name: _xxh3(folder / name, stop), names, stop)


def each(work: Callable[[str], T], names: list[str], stop: Event) -> dict[str, T]:
    """Do something for each name, a few at a time; the first failure stops the others."""
    with ThreadPoolExecutor(N_THREADS) as pool:
        futures = {name: pool.submit(work, name) for name in names}
        try:
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            # Also where a signal's handler raises while this waits.
            failed = any(f.done() and f.exception() for f in futures.values())
            if failed or not all(f.done() for f in futures.values()):
                stop.set()
                pool.shutdown(cancel_futures=True)
    for future in futures.values():
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, Stopped):
            raise error
    return {name: future.result() for name, future in futures.items()}


def can_share(file: Path, folder: Path) -> bool:
    """Tell whether a file's bytes can be shared with a folder: tried, as rights decide as well.

    The folder is the caller's alone.
    """
    probe = folder / "probe"
    try:
        share(file, probe)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def share(source: Path, target: Path) -> None:
    """Make a second file of the same bytes: blocks that are copied on write, else a hard link.

    A hard link is the same file: who edits the source in place edits both. Rows and weights are
    replaced by renaming, which leaves a link as it is; anything else shows in the hashes.
    """
    real = source.resolve()
    with real.open("rb") as here, target.open("xb") as there:
        try:
            fcntl.ioctl(there.fileno(), FICLONE, here.fileno())
            return
        except OSError:
            pass
    target.unlink()
    os.link(real, target)


def _pass_through(source: Path, writing: int | None, stop: Event) -> FileHashes:
    """Read a file once: hash it both ways, and write it out if there is where to."""
    fast, exact, n_bytes = xxhash.xxh3_128(), hashlib.sha256(), 0
    # SHA-256 is the slowest part by far, so it has a thread of its own.
    with ThreadPoolExecutor(1) as hasher, source.open("rb", buffering=0) as stream:
        buffers = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(2)]
        pending, turn = None, 0
        while n := stream.readinto(buffers[turn]):
            if stop.is_set():
                raise Stopped
            chunk = buffers[turn][:n]
            if pending is not None:
                pending.result()
            pending = hasher.submit(exact.update, chunk)
            fast.update(chunk)
            if writing is not None:
                _write(writing, chunk)
            n_bytes, turn = n_bytes + n, 1 - turn
    return FileHashes(n_bytes=n_bytes, xxh3_128=fast.hexdigest(), sha256=exact.hexdigest())


def _write(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def _xxh3(path: Path, stop: Event) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        while n := stream.readinto(buffer):
            if stop.is_set():
                raise Stopped
            digest.update(buffer[:n])
    return digest.hexdigest()
