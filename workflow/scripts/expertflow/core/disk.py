"""Refuse to write what a file system has no room for, and name the one that is full."""

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from expertflow.core.errors import HardwareError, iter_causes
from expertflow.core.format import size

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = "free some, or move results/ and state/ to another disk"
_CLOSED = "cannot be opened or written by this user; correct its permissions, or its owner"
# What else a user can cause and repair, and what to do about it.
OS_ERRORS = {
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: "is on a file system that is read-only; mount it for writing, or use --directory",
    errno.ENAMETOOLONG: "is a longer name than the file system takes; shorten it",
    errno.ENOTDIR: "a file lies where a folder is needed; move it away, or name another folder",
}


class DiskFullError(OSError):
    """An output did not fit on its file system, or into what a user may write there."""

    def __init__(self, number: int, path: Path, n_written: int) -> None:
        mount = _find_mount(path)
        # What was written is removed.
        free = free_bytes(path) + n_written
        # A quota or a limit of file size tells nothing of the disk, only that this much was too
        # much.
        least = free if number == errno.ENOSPC else n_written
        told = f"{os.strerror(number).lower()}, more than {size(least)} needed"
        super().__init__(number, f"{told}; file system {mount} has {size(free)} free", str(path))


def find_full(error: BaseException) -> int | None:
    """Return the number of the system's error if a full disk led to an error; null otherwise."""
    for cause in iter_causes(error):
        # Libraries in Rust have their own errors, with the number in the text.
        told = re.search(r"\(os error (\d+)\)", str(cause))
        number = getattr(cause, "errno", None) or (told and int(told[1]))
        if number in FULL:
            return number
    return None


def describe_os_error(error: OSError) -> str | None:
    """Return the line for a user that an error of the system is worth; null for a bug."""
    number, place = error.errno or 0, error.filename2 or error.filename
    if number not in FULL:
        fix = OS_ERRORS.get(number)
        return fix and f"{place or 'the file system of the output'}: {fix}"
    told = error.strerror
    if not isinstance(error, DiskFullError):
        told = f"{os.strerror(number).lower()}; {describe_space(Path(place or 'results'))}"
    return f"{place or 'an output'}: {told}; {MAKE_ROOM}"


def check_space(needs: Iterable[tuple[Path, float, str]], *, fix: str = MAKE_ROOM) -> None:
    """Raise HardwareError if what is to be written, as (place, bytes, what), does not fit.

    What lies on one file system has to fit there together.
    """
    by_mount: dict[Path, list[tuple[Path, float, str]]] = {}
    for need in needs:
        by_mount.setdefault(_find_mount(need[0]), []).append(need)
    for mount, own in by_mount.items():
        needed = sum(n_bytes for _, n_bytes, _ in own)
        if free_bytes(mount) < needed:
            told = " and ".join(what for _, _, what in own)
            space = describe_space(mount)
            raise HardwareError(f"{own[0][0]}: {space}, {size(needed)} needed for {told}; {fix}")


def describe_space(place: Path) -> str:
    """Return the file system of a place, which may not exist yet, and what is free there."""
    return f"file system {_find_mount(place)} has {size(free_bytes(place))} free"


def free_bytes(place: Path) -> int:
    return shutil.disk_usage(_find_mount(place)).free


def _find_mount(place: Path) -> Path:
    # A place that does not exist yet will be on the file system of its nearest parent.
    path = place.resolve()
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))
