"""What a place that keeps copies can do, and which files are copied."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from expertflow.core.errors import HardwareError
from expertflow.core.records import Record


class SyncFailed(HardwareError):
    """What was to be copied is not there, or not known to be there."""


class NotThere(SyncFailed):
    """A place holds nothing under the key that it was asked for."""


class Sent(Record, frozen=True, kw_only=True):
    """What a copy took; ``verified`` says in words how it was compared."""

    n_files: int
    n_bytes: int
    verified: str


class Store(Protocol):
    """A place that keeps folders by key, ``a/b/c``.

    Every method raises SyncFailed where it could not do all it was asked, and soon after the event
    that the store was opened with is set.
    """

    @property
    def shown(self) -> str:
        """Give the place in words, without secrets."""

    def send(self, folder: Path, key: str, names: Iterable[str]) -> Sent:
        """Copy files of a folder, by relative names; compare what is there then with them."""

    def fetch(self, key: str, folder: Path) -> None:
        """Copy all files below a key into a folder; whether they are whole, the caller checks.

        Raises NotThere where there is none, if the place can tell.
        """

    def names(self, key: str) -> list[str]:
        """List what lies directly below a key; nothing where there is no such key."""

    def drop(self, key: str) -> None:
        """Remove a file, or all files below a key."""


def files_below(
    folder: Path, *, skip: frozenset[str] = frozenset(), only_a_look: bool = False
) -> list[str]:
    """List files by relative name, in a fixed order; ``skip`` are names of files and folders.

    What is half-written is left out. A link to a file or a folder counts as what it leads to.
    ``only_a_look`` leaves out linked folders and what cannot be read.

    Raises:
        SyncFailed: something there cannot be listed, or leads nowhere.
    """
    found = []
    failed = None if only_a_look else _failed
    for place, folders, files in os.walk(folder, onerror=failed, followlinks=not only_a_look):
        folders[:] = sorted(name for name in folders if _is_wanted(name, skip))
        names = [name for name in files if _is_wanted(name, skip)]
        paths = [Path(place, name) for name in sorted(names)]
        if not only_a_look:
            for path in (*paths, *(Path(place, name) for name in folders)):
                _check_link(path, folder)
        found += [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    return found


def _failed(error: OSError) -> None:
    # What went away meanwhile is not there, rather than not copied.
    if not isinstance(error, FileNotFoundError):
        raise SyncFailed(f"{error.filename}: cannot be listed: {error.strerror}") from error


def _check_link(path: Path, folder: Path) -> None:
    """Refuse a link that leads nowhere, or back to a folder that it lies in."""
    if not path.is_symlink():
        return
    if not path.exists():
        raise SyncFailed(f"{path}: a link that leads nowhere; remove it, or leave it out by --skip")
    above = [path.parent, *(p for p in path.parent.parents if p == folder or folder in p.parents)]
    if path.is_dir() and path.resolve() in {p.resolve() for p in above}:
        raise SyncFailed(f"{path}: a link to a folder that it lies in; remove it")


def _is_wanted(name: str, skip: frozenset[str]) -> bool:
    return name not in skip and not name.endswith(".partial")


def check_key(key: str) -> str:
    """Give back a key that came from a store, if it stays below where it is put.

    Raises:
        SyncFailed: it does not.
    """
    if key.startswith("/") or ".." in key.split("/") or not key:
        raise SyncFailed(f"{key!r} is no name of a file below a folder; the store is not ours")
    return key
