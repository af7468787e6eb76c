"""Stores of copies: their addresses, operations, and which files are copied."""

import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertflow.core.errors import ConfigError, DataError, HardwareError
from expertflow.core.files import CHUNK_BYTES
from expertflow.core.records import Record

log = logging.getLogger(__name__)
S3 = "s3://"
REMOTE = re.compile(r"^(rsync://|[^/]+:)")
# user:password@ in an address, and its query string.
SECRETS = re.compile(r"(?<=://)[^/@]+@|\?.*$")


class SyncFailed(HardwareError):
    """A copy is missing, or not known to be complete."""


class NotThere(SyncFailed):
    """The store has nothing under the requested key."""


@contextmanager
def convert_errors(what: str) -> Iterator[None]:
    """Convert any error into SyncFailed: no copy may end a guard while the machine is paid for."""
    try:
        yield
    except SyncFailed:
        raise
    except (DataError, OSError) as error:
        raise SyncFailed(f"{what}: {error}") from error
    except Exception as error:
        log.error("unexpected error in a copy", exc_info=error)
        raise SyncFailed(f"{what}: {type(error).__name__}: {error}") from error


class SendRecord(Record, frozen=True, kw_only=True):
    """One verified transfer; ``verified`` is how it was compared.

    ``n_bytes`` is what was transferred; for a checkpoint, its total size in the store.
    """

    what: str
    n_files: int
    n_bytes: int
    duration_s: float
    verified: str


class Store(ABC):
    """A store of folders by key, ``a/b/c``; ``shown`` is its address without secrets.

    Every method raises SyncFailed if it could not finish, and soon after ``cancel`` is set.
    """

    def __init__(self, shown: str, cancel: threading.Event) -> None:
        self.shown, self._cancel, self._chunk_bytes = shown, cancel, CHUNK_BYTES

    def send_files(self, folder: Path, key: str, names: Iterable[str]) -> SendRecord:
        """Copy files of a folder, by relative path, then verify the copies."""
        start_s, wanted = time.monotonic(), list(names)
        n_bytes, verified = self._transfer_files(folder, key, wanted)
        return SendRecord(
            what=key,
            n_files=len(wanted),
            n_bytes=n_bytes,
            duration_s=round(time.monotonic() - start_s, 3),
            verified=verified,
        )

    def _transfer_files(self, folder: Path, key: str, names: list[str]) -> tuple[int, str]:
        n_bytes, ways = 0, set()
        for name in names:
            n_moved, way = self._transfer_file(folder / name, f"{key}/{name}")
            n_bytes += n_moved
            ways.add(way)
        return n_bytes, " and ".join(sorted(ways)) or "nothing to compare"

    def _transfer_file(self, path: Path, key: str) -> tuple[int, str]:
        """Copy a file unless it exists; return the bytes moved, and how it was compared."""
        raise NotImplementedError

    @abstractmethod
    def fetch(self, key: str, folder: Path) -> None:
        """Copy a file, or all files below a key, into a folder, unverified; may raise NotThere."""

    @abstractmethod
    def list_names(self, key: str) -> list[str]:
        """Return the names directly below a key; empty without such a key."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a file, or all files below a key."""

    def _check_wanted(self, _: int = 0) -> None:
        if self._cancel.is_set():
            raise SyncFailed(f"{self.shown}: the copy was canceled")

    def _chunks(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as stream:
            while chunk := stream.read(self._chunk_bytes):
                self._check_wanted()
                yield chunk


def is_local(destination: str) -> bool:
    return not destination.startswith(S3) and REMOTE.match(destination) is None


def check_destination(destination: str) -> None:
    """Raise ConfigError if an address is empty, of an unsupported kind, or without a bucket."""
    # rsync would take s3:/bucket and gs://bucket for hosts; s3//bucket would be a folder.
    is_address = re.match(r"s3:|s3//|.*://", destination, re.IGNORECASE)
    is_known = re.match(rf"({S3}|rsync://)[^/]", destination)
    if not destination or (is_address and not is_known):
        raise ConfigError(
            f"destination {destination!r}: is not supported; use a path, host:path, rsync://… or"
            " s3://bucket/prefix"
        )


def check_key(key: str) -> str:
    """Return a key from a store; raise SyncFailed if it leads outside."""
    if key.startswith("/") or ".." in key.split("/") or not key:
        raise SyncFailed(f"{key!r} is not a path inside a folder; check the destination")
    return key


def files_below(folder: Path, *, skip: Collection[str] = ()) -> list[str]:
    """List files by relative path in a fixed order, without partial ones and names to ``skip``.

    Raise SyncFailed for a dangling link or an unreadable folder.
    """
    found = []
    for place, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        # In place, because os.walk descends into the folders of this list.
        folders[:], names = (
            sorted(name for name in some if name not in skip and not name.endswith(".partial"))
            for some in (folders, files)
        )
        paths = [Path(place, name) for name in names]
        for path in (*paths, *(Path(place, name) for name in folders)):
            _check_link(path, folder)
        found += [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    return found


def _refuse(error: OSError) -> None:
    # A vanished folder is absent, not a failed copy.
    if not isinstance(error, FileNotFoundError):
        raise SyncFailed(f"{error.filename}: cannot be listed: {error.strerror}") from error


def _check_link(path: Path, folder: Path) -> None:
    if not path.is_symlink():
        return
    if not path.exists():
        raise SyncFailed(f"{path}: a dangling link; remove it")
    # A link to a folder above it would be followed endlessly.
    above = [path.parent, *(p for p in path.parent.parents if p == folder or folder in p.parents)]
    if path.is_dir() and path.resolve() in {p.resolve() for p in above}:
        raise SyncFailed(f"{path}: a link to a folder that contains it; remove it")
