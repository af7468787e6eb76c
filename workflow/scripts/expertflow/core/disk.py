"""Refuse writes that do not fit on their file system, and name the full one."""

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from expertflow.core.errors import HardwareError, iter_causes
from expertflow.core.format import size

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = "free some space, or move results/ and state/ to another disk"
_CLOSED = "cannot be opened or written by this user; correct its permissions or owner"
# Other errors that a user can cause and fix, and how.
OS_ERRORS = {
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: "is on a read-only file system; mount it for writing, or use --directory",
    errno.ENAMETOOLONG: "has a name too long for the file system; shorten it",
    errno.EISDIR: "a folder exists where a file is needed; name a file in it, or move it",
    errno.ENOTDIR: "a file exists where a folder is needed; move it, or choose another folder",
}


class DiskFullError(OSError):
    """An output did not fit on its file system, or within the user's quota or limit there."""

    def __init__(self, number: int, path: Path, n_written: int) -> None:
        mount = _find_mount(path)
        # The partial output will be removed.
        free = free_bytes(path) + n_written
        # A quota or a file-size limit says nothing about the disk, only that this was too much.
        least = free if number == errno.ENOSPC else n_written
        reason = f"{os.strerror(number).lower()}, more than {size(least)} needed"
        super().__init__(number, f"{reason}; file system {mount} has {size(free)} free", str(path))


def find_full(error: BaseException) -> int | None:
    """Return the errno if a full disk caused an error; null otherwise."""
    for cause in iter_causes(error):
        # Rust libraries have their own errors, with the number in the text.
        found = re.search(r"\(os error (\d+)\)", str(cause))
        number = getattr(cause, "errno", None) or (found and int(found[1]))
        if number in FULL:
            return number
    return None


def describe_os_error(error: OSError) -> str | None:
    """Return the line that a user sees for a system error; null for a bug."""
    number, place = error.errno or 0, error.filename2 or error.filename
    if number not in FULL:
        fix = OS_ERRORS.get(number)
        return fix and f"{place or 'the file system of the output'}: {fix}"
    reason = error.strerror
    if not isinstance(error, DiskFullError):
        reason = f"{os.strerror(number).lower()}; {describe_space(Path(place or 'results'))}"
    return f"{place or 'an output'}: {reason}; {MAKE_ROOM}"


def check_space(needs: Iterable[tuple[Path, float, str]], *, fix: str = MAKE_ROOM) -> None:
    """Raise HardwareError if planned writes, as (place, bytes, what), do not fit.

    Writes to the same file system must fit there together.
    """
    by_mount: dict[Path, list[tuple[Path, float, str]]] = {}
    for need in needs:
        by_mount.setdefault(_find_mount(need[0]), []).append(need)
    for mount, own in by_mount.items():
        needed = sum(n_bytes for _, n_bytes, _ in own)
        # Some network file systems report no size at all.
        if free_bytes(mount) < needed and shutil.disk_usage(mount).total:
            contents = " and ".join(what for _, _, what in own)
            space = describe_space(mount)
            raise HardwareError(
                f"{own[0][0]}: {space}, {size(needed)} needed for {contents}; {fix}"
            )


def describe_space(place: Path) -> str:
    """Describe the file system of a place, which may not exist yet, and its free space."""
    return f"file system {_find_mount(place)} has {size(free_bytes(place))} free"


def free_bytes(place: Path) -> int:
    return shutil.disk_usage(_find_mount(place)).free


def _find_mount(place: Path) -> Path:
    # A place that does not exist yet will be on the file system of its nearest parent.
    path = place.resolve()
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))
