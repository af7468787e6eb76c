"""Find places for a copy of the rows, and measure how fast it would be read."""

import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from expertflow.core.format import gb
from expertflow.hardware.records import ScratchFacts

FILE_BYTES, CHUNK_BYTES = 256 << 20, 4 << 20
# A place is measured only where the file would take at most a quarter of what is free.
ROOM = 4
IN_MEMORY = {"tmpfs", "ramfs"}
NOT_ASKED = "not measured: not asked for"
# Of a file that is there: less tells of the cache and not of the disk, more holds up (judgment).
LEAST_BYTES, LONGEST_S = 16 << 20, 1.0
# Bytes a second, or null, and how they were measured, or why not.
Speed = tuple[float | None, str]


def candidates(
    configured: str | None, environment: dict[str, str], root: Path = Path("/")
) -> Iterator[tuple[Path, str]]:
    if configured is not None:
        yield Path(configured), "scratch setting"
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        if environment.get(name):
            yield Path(environment[name]), name
    nvme = map(str, sorted(root.glob("mnt/nvme*")))
    for place in ("scratch", "local", *nvme, "dev/shm", "tmp"):
        yield root / place, "usual place"


def scratch_facts(
    places: Iterator[tuple[Path, str]], *, measure: bool, file_bytes: int = FILE_BYTES
) -> tuple[ScratchFacts, ...]:
    measured: dict[int, Speed] = {}
    found: dict[Path, ScratchFacts] = {}
    for path, asked_by in places:
        place = path.resolve()
        if place in found or not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            continue
        usage, kind = psutil.disk_usage(str(place)), file_system(place)
        device = place.stat().st_dev
        if kind in IN_MEMORY:
            speed, method = None, "not measured: it is memory, and takes from what training has"
        elif not measure:
            speed, method = None, NOT_ASKED
        elif usage.free < ROOM * file_bytes:
            speed, method = None, f"not measured: only {gb(usage.free)} free"
        else:
            if device not in measured:
                measured[device] = read_speed(place, file_bytes)
            speed, method = measured[device]
        found[place] = ScratchFacts(
            path=str(path),
            asked_by=asked_by,
            file_system=kind,
            is_memory=kind in IN_MEMORY,
            is_rotational=None if kind in IN_MEMORY else rotational(device),
            free_bytes=usage.free,
            total_bytes=usage.total,
            read_bytes_per_s=speed,
            read_method=method,
        )
    return tuple(found.values())


def read_speed(folder: Path, file_bytes: int) -> Speed:
    """Write a file, drop it from the page cache, read it once in order.

    It has no name, so that not even a kill leaves it, and random content that nothing compresses.
    """
    try:
        writing, name = tempfile.mkstemp(dir=folder, prefix=".expertflow-speed-")
        try:
            descriptor, how = _open_past_the_cache(name)
        finally:
            Path(name).unlink()
        try:
            for _ in range(0, file_bytes, CHUNK_BYTES):
                block = memoryview(os.urandom(CHUNK_BYTES))
                while block:
                    block = block[os.write(writing, block) :]
            os.fsync(writing)
            os.posix_fadvise(writing, 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_all(descriptor, how)
        finally:
            os.close(writing)
            os.close(descriptor)
    except OSError as error:
        return None, f"not measured: {error.strerror}"


def file_read_speed(file: Path) -> Speed:
    """Read the start of a file once in order, past the page cache, for a second at most."""
    try:
        size = file.stat().st_size
        if size < LEAST_BYTES:
            return None, f"not measured: {size / 1e6:.1f} MB say nothing, 16 MiB would"
        if file_system(file.resolve()) in IN_MEMORY:
            return None, "not measured: it is in memory"
        descriptor, how = _open_past_the_cache(file)
        try:
            if "dropped" in how:
                os.posix_fadvise(descriptor, 0, FILE_BYTES, os.POSIX_FADV_DONTNEED)
            return _read_all(descriptor, how, most_bytes=FILE_BYTES, longest_s=LONGEST_S)
        finally:
            os.close(descriptor)
    except OSError as error:
        return None, f"not measured: {error.strerror}"


def _open_past_the_cache(name: str | Path) -> tuple[int, str]:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECT), "past the page cache (O_DIRECT)"
    except OSError:
        # Some file systems refuse it.
        return os.open(name, os.O_RDONLY), "page cache dropped first"


def _read_all(
    descriptor: int, how: str, *, most_bytes: int = sys.maxsize, longest_s: float = math.inf
) -> Speed:
    # An anonymous map lies on a page boundary, as O_DIRECT wants it.
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        start, position, seconds = time.perf_counter(), 0, 0.0
        while position < most_bytes and seconds < longest_s:
            n = os.preadv(descriptor, [buffer], position)
            position, seconds = position + n, time.perf_counter() - start
            if n < CHUNK_BYTES:
                # The end; O_DIRECT would not go on from where no block begins.
                break
    return position / seconds, f"{position >> 20} MiB in order, {how}"


def file_system(path: Path) -> str | None:
    best, kind = -1, None
    for part in psutil.disk_partitions(all=True):
        mount = Path(part.mountpoint)
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), part.fstype
    return kind


def rotational(device: int, root: Path = Path("/sys/dev/block")) -> bool | None:
    place = root / f"{os.major(device)}:{os.minor(device)}"
    # A partition's queue is its disk's.
    for folder in (place, place.resolve().parent):
        flag = folder / "queue" / "rotational"
        if flag.is_file():
            return flag.read_text(encoding="utf-8").strip() == "1"
    return None
