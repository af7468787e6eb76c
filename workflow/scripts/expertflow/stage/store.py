"""Where copies lie: a folder for each key, a marker that is written last, and two locks.

    {scratch}/expertflow-{user id}/{key}/
        files/     the copy
        done.json  sizes and hashes; touched whenever the copy is used
    .{key}.lock    held by who looks for the copy or makes it, for as long as that takes
    .{key}.use     shared by who reads the copy; whoever removes it needs it alone
    .{key}.partial a copy in the making, with what it will take up
    .store.lock    held while room is made and taken

A copy counts only with its marker, and that is written when every file is whole and flushed. Locks
are flocks: they end with the process, however it ends.
"""

import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from expertflow.core.errors import DataError
from expertflow.core.files import remove, sync_directory, write_text
from expertflow.core.records import from_json, read_record, write_record
from expertflow.stage.copy import How

log = logging.getLogger(__name__)
MARKER, FILES, PLANNED = "done.json", "files", "planned.json"
# A copy is made only where so much more than its size is free.
SPACE_RESERVE = 1.1
PAUSE_S = 0.05


class NotStaged(Exception):
    """A copy cannot be had here; what was to be copied is read where it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedFile:
    """A file of a copy as it has to be."""

    n_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What a whole copy consists of. ``id`` tells one copy of a key from the next."""

    id: str
    how: How
    n_bytes: int
    files: dict[str, CopiedFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """The copies in one place. Without a quota they may fill the disk, up to the reserve."""

    root: Path
    quota_bytes: int | None = None

    def files(self, key: str) -> Path:
        """Give the folder that holds the copy of a key."""
        return self.root / key / FILES

    def partial(self, key: str) -> Path:
        """Give the folder in which the copy of a key is made."""
        return self.root / f".{key}.partial"

    @contextmanager
    def looking(self, key: str) -> Iterator[None]:
        """Be the only one who looks for, makes or removes the copy of a key."""
        with self._lock(key) as stream:
            if not _try_lock(stream, fcntl.LOCK_EX):
                log.info("%s: waits for another process that copies it", self.root / key)
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def share(self, key: str) -> IO[str]:
        """Hold a copy until the stream is closed; only while ``looking``, so nobody is in the way.

        The copy then counts as just used.
        """
        stream = self._use(key)
        fcntl.flock(stream, fcntl.LOCK_SH)
        os.utime(self.root / key / MARKER)
        return stream

    def find(self, key: str) -> Marker | None:
        """Give the marker of a copy if all its files are there in their sizes."""
        try:
            marker: Marker = read_record(Marker, self.root / key / MARKER)
            for name, file in marker.files.items():
                if (self.files(key) / name).stat().st_size != file.n_bytes:
                    return None
        except (DataError, OSError, UnicodeDecodeError):
            # Missing or damaged: the copy is made again.
            return None
        return marker

    def clear(self, key: str, *, patience_s: float) -> None:
        """Remove what is left of a copy; only while ``looking``.

        Raises:
            NotStaged: somebody still reads it.
        """
        if not (self.root / key).exists():
            remove(self.partial(key))
            return
        until = time.monotonic() + patience_s
        with self._use(key) as stream:
            while not _try_lock(stream, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise NotStaged(f"{self.root / key} is damaged and another process reads it")
                time.sleep(PAUSE_S)
            # First what makes it count.
            remove(self.root / key / MARKER)
            remove(self.root / key)
        remove(self.partial(key))

    def begin(self, key: str, n_bytes: int) -> Path:
        """Make room for a copy and take it; give the folder to copy to.

        Raises:
            NotStaged: there is not enough room, even without the copies that nobody reads.
        """
        folder = self.partial(key)
        with self._counting():
            self._make_room(key, n_bytes)
            (folder / FILES).mkdir(parents=True)
            write_text(folder / PLANNED, json.dumps({"n_bytes": n_bytes}))
        return folder / FILES

    def finish(self, key: str, *, how: How, files: dict[str, CopiedFile]) -> Marker:
        """Put a copy that is whole and flushed in its place, and mark it."""
        n_bytes = sum(file.n_bytes for file in files.values()) if how == "copied" else 0
        marker = Marker(id=secrets.token_hex(8), how=how, n_bytes=n_bytes, files=files)
        # It is counted as promised or as kept: between the two it would be as if not there.
        with self._counting():
            remove(self.partial(key) / PLANNED)
            self.partial(key).rename(self.root / key)
            sync_directory(self.root)
            write_record(self.root / key / MARKER, marker)
        return marker

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Be the only one who makes, takes or fills room. Who waits here may hold other locks."""
        with _open(self.root / ".store.lock") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _lock(self, key: str) -> IO[str]:
        return _open(self.root / f".{key}.lock")

    def _use(self, key: str) -> IO[str]:
        return _open(self.root / f".{key}.use")

    def _make_room(self, key: str, n_bytes: int) -> None:
        """Remove copies that nobody reads, the least recently used first, until there is room."""
        if self.quota_bytes is not None and n_bytes > self.quota_bytes:
            raise NotStaged(
                f"{n_bytes / 1e9:.2f} GB are more than the quota of {self.root},"
                f" {self.quota_bytes / 1e9:.2f} GB"
            )
        for path in self.root.glob("[!.]*"):
            if path.name != key and not (path / MARKER).exists():
                # Left by a process that was killed between the last two steps.
                self._evict(path.name)
        idle = [name for name in self._oldest_first(key) if self._is_idle(name)]
        short = self._short_of(key, n_bytes, without=idle)
        if short is not None:
            # Removing them would be in vain.
            raise NotStaged(short)
        while (short := self._short_of(key, n_bytes)) is not None:
            if not idle:
                # Somebody has begun to read one meanwhile.
                raise NotStaged(short)
            self._evict(idle.pop(0))

    def _short_of(self, key: str, n_bytes: int, without: Sequence[str] = ()) -> str | None:
        """Say what there is too little of, were some copies removed; null if the copy fits."""
        kept, promised = self._kept_bytes(without), self._promised_bytes(key)
        planned = sum(promised.values())
        if self.quota_bytes is not None and kept + planned + n_bytes > self.quota_bytes:
            return (
                f"{(kept + planned) / 1e9:.2f} GB in {self.root} are in use, {n_bytes / 1e9:.2f} GB"
                f" are needed and the quota is {self.quota_bytes / 1e9:.2f} GB"
            )
        # What another copy will take up is not free, though it is not there yet.
        free = shutil.disk_usage(self.root).free + sum(_size(self.root / k) for k in without)
        free -= sum(max(0, n - _size(self.partial(k))) for k, n in promised.items())
        needed = n_bytes * SPACE_RESERVE
        if free < needed:
            return (
                f"{self.root}: {max(0, free) / 1e9:.2f} GB free, counting copies that nobody reads,"
                f" {needed / 1e9:.2f} GB needed"
            )
        return None

    def _kept_bytes(self, without: Sequence[str]) -> int:
        keys = {path.parent.name for path in self.root.glob(f"*/{MARKER}")}.difference(without)
        return sum(marker.n_bytes for key in keys if (marker := self.find(key)) is not None)

    def _promised_bytes(self, key: str) -> dict[str, int]:
        """Give what other copies in the making take up; those of dead processes are removed."""
        promised = {}
        for partial in self.root.glob(".*.partial"):
            other = partial.name.removeprefix(".").removesuffix(".partial")
            if other == key:
                continue
            with self._lock(other) as stream:
                if _try_lock(stream, fcntl.LOCK_EX):
                    log.info("%s: removed, whoever made it is gone", partial)
                    remove(partial)
                    continue
            try:
                planned = json.loads((partial / PLANNED).read_text(encoding="utf-8"))
                promised[other] = from_json(int, planned["n_bytes"])
            except FileNotFoundError:
                # Not begun yet, or given up in this moment.
                continue
        return promised

    def _oldest_first(self, key: str) -> list[str]:
        used: list[tuple[float, str]] = []
        for path in self.root.glob(f"*/{MARKER}"):
            # One may be found damaged and removed by another process in this moment.
            with suppress(FileNotFoundError):
                used.append((path.stat().st_mtime, path.parent.name))
        return [name for _, name in sorted(used) if name != key]

    def _is_idle(self, key: str) -> bool:
        with self._lock(key) as looking, self._use(key) as use:
            return _try_lock(looking, fcntl.LOCK_EX) and _try_lock(use, fcntl.LOCK_EX)

    def _evict(self, key: str) -> None:
        """Remove a copy unless somebody reads it or looks for it."""
        with self._lock(key) as looking, self._use(key) as use:
            if _try_lock(looking, fcntl.LOCK_EX) and _try_lock(use, fcntl.LOCK_EX):
                log.info("%s: removed to make room", self.root / key)
                remove(self.root / key / MARKER)
                remove(self.root / key)


def open_store(scratch: Path, quota_gib: float | None) -> Store:
    """Open this user's store below a directory, or make it; only its owner may write there.

    Raises:
        NotStaged: it belongs to somebody else, who could put anything there.
        OSError: it cannot be made.
    """
    # By user, so that those who share a disk do not shut each other out.
    root = scratch / f"expertflow-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NotStaged(f"{root} is not a directory that you alone may write to")
    quota_bytes = None if quota_gib is None else int(quota_gib * (1 << 30))
    return Store(root=root, quota_bytes=quota_bytes)


def _open(path: Path) -> IO[str]:
    """Open a lock's file, as new as if just made: what is old may be swept away by the system."""
    stream = path.open("a")
    os.utime(stream.fileno())
    return stream


def _try_lock(stream: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    """Add up what removing a folder frees: a file that is linked to elsewhere stays."""
    total = 0
    # Not by glob: what is removed in this moment is an error there.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found = Path(place, name).lstat()
                total += found.st_size if found.st_nlink == 1 else 0
    return total
