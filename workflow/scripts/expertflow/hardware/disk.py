"""Find places for a copy of the rows, and measure how fast it could be read."""

import math
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import psutil

from expertflow.core.format import gb

FILE_BYTES, CHUNK_BYTES = 256 << 20, 4 << 20
# A place is measured only if the file would take at most a quarter of the free space.
ROOM = 4
IN_MEMORY = {"tmpfs", "ramfs"}
NOT_ASKED = "not measured: not requested"
# For an existing file: less would measure the cache, not the disk; more takes too long (judgment).
LEAST_BYTES, LONGEST_S = 16 << 20, 1.0
# Bytes a second, or null, and how they were measured, or why not.
Speed = tuple[float | None, str]


def list_candidates(
    environment: Mapping[str, str], root: Path = Path("/")
) -> Iterator[tuple[Path, str]]:
    """Yield candidate places for a copy, and why: a variable, or a usual place."""
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        if environment.get(name):
            yield Path(environment[name]), name
    nvme = map(str, sorted(root.glob("mnt/nvme*")))
    for place in ("scratch", "local", *nvme, "dev/shm", "tmp"):
        yield root / place, "usual place"


def describe_places(
    places: Iterable[tuple[Path, str]], *, measure: bool, file_bytes: int = FILE_BYTES
) -> list[dict[str, Any]]:
    """Describe the writable places as JSON, once each; each device is measured once.

    ``read_method``: how the speed was measured, or why not.
    """
    measured: dict[int, Speed] = {}
    found: dict[Path, dict[str, Any]] = {}
    for path, asked_by in places:
        place = path.resolve()
        # Access first: below an inaccessible folder, is_dir() raises.
        if place in found or not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
            continue
        free, kind, device = shutil.disk_usage(place).free, file_system(place), place.stat().st_dev
        speed: Speed = None, NOT_ASKED
        if kind in IN_MEMORY:
            speed = None, "not measured: it is memory, which training needs"
        elif measure and free < ROOM * file_bytes:
            speed = None, f"not measured: only {gb(free)} free"
        elif measure:
            speed = measured[device] = measured.get(device) or measure_disk(place, file_bytes)
        found[place] = {
            "path": str(path),
            "asked_by": asked_by,
            "file_system": kind,
            "free_bytes": free,
            "read_bytes_per_s": speed[0],
            "read_method": speed[1],
        }
    return list(found.values())


def measure_disk(folder: Path, file_bytes: int) -> Speed:
    """Write an unlinked file, which even a kill removes, drop it from the page cache, read it."""
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".expertflow-speed-")
        with os.fdopen(descriptor, "wb") as file:
            try:
                stream, how = _open_past_the_cache(Path(name))
            finally:
                Path(name).unlink()
            with stream:
                for _ in range(0, file_bytes, CHUNK_BYTES):
                    # Random bytes, because a file system may compress others.
                    file.write(os.urandom(CHUNK_BYTES))
                file.flush()
                # Unwritten pages cannot be dropped from the cache.
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                return _read_all(stream, how)
    except OSError as error:
        return None, f"not measured: {error.strerror}"


def measure_file(file: Path) -> Speed:
    """Read the start of a file once, sequentially, past the page cache, for at most a second."""
    try:
        size = file.stat().st_size
        if size < LEAST_BYTES:
            return None, f"not measured: {size / 1e6:.1f} MB are too few, 16 MiB needed"
        if file_system(file.resolve()) in IN_MEMORY:
            return None, "not measured: it is in memory"
        stream, how = _open_past_the_cache(file)
        with stream:
            return _read_all(stream, how, most_bytes=FILE_BYTES, longest_s=LONGEST_S)
    except OSError as error:
        return None, f"not measured: {error.strerror}"


def _open_past_the_cache(path: Path) -> tuple[RawIOBase, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        # Some file systems do not support it.
        stream = path.open("rb", buffering=0)
        os.posix_fadvise(stream.fileno(), 0, FILE_BYTES, os.POSIX_FADV_DONTNEED)
        return stream, "page cache dropped first"
    return os.fdopen(descriptor, "rb", buffering=0), "past the page cache (O_DIRECT)"


def _read_all(
    stream: RawIOBase, how: str, *, most_bytes: int = sys.maxsize, longest_s: float = math.inf
) -> Speed:
    # An anonymous map is page-aligned, as O_DIRECT requires.
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        start, n_bytes, seconds, n = time.perf_counter(), 0, 0.0, CHUNK_BYTES
        # O_DIRECT cannot continue after a short read, which is not at a block boundary.
        while n == CHUNK_BYTES and n_bytes < most_bytes and seconds < longest_s:
            n = stream.readinto(buffer) or 0
            n_bytes, seconds = n_bytes + n, time.perf_counter() - start
    return n_bytes / seconds, f"{n_bytes >> 20} MiB in order, {how}"


def file_system(path: Path) -> str | None:
    """Return the type of a path's file system: of the last one mounted deepest."""
    parts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((parts[place] for place in (path, *path.parents) if place in parts), None)
