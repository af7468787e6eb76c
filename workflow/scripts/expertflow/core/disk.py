"""Refuse to write what a file system has no room for, and name the one that is full."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from expertflow.core.errors import HardwareError
from expertflow.core.format import size


def check_space(needs: Iterable[tuple[Path, float, str]], *, fix: str) -> None:
    """Raise HardwareError if what is to be written, as (place, bytes, what), does not fit.

    What lies on one file system has to fit there together.
    """
    by_mount: dict[Path, list[tuple[Path, float, str]]] = {}
    for need in needs:
        by_mount.setdefault(_find_mount(need[0]), []).append(need)
    for mount, own in by_mount.items():
        needed = sum(n_bytes for _, n_bytes, _ in own)
        if shutil.disk_usage(mount).free < needed:
            told = " and ".join(what for _, _, what in own)
            space = describe_space(mount)
            raise HardwareError(f"{own[0][0]}: {space}, {size(needed)} needed for {told}; {fix}")


def describe_space(place: Path) -> str:
    """Return the file system of a place, which may not exist yet, and what is free there."""
    mount = _find_mount(place)
    return f"file system {mount} has {size(shutil.disk_usage(mount).free)} free"


def _find_mount(place: Path) -> Path:
    path = place.resolve()
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))
