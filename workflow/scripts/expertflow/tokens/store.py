"""Store tokens by what they were made from, so that the same ones are never made twice.

Results are hard links into the store: they take no extra space, and come back at once.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from expertflow.core.files import link_or_copy, remove, sync, sync_directory

# A job writes to a folder that it fills, and links what it took, within this time.
ABANDONED_S = 3600


def ensure_stored(store: Path, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
    """Return the folder of ``key`` and whether it was there; else ``make`` fills it, or nothing.

    Two jobs may make the same folder at once: the first one to end is taken by both.
    """
    folder = store / key
    if folder.is_dir():
        return folder, True
    store.mkdir(parents=True, exist_ok=True)
    # Not named by the process: those of two machines may have one number.
    partial = Path(tempfile.mkdtemp(dir=store, prefix=f".{key}.", suffix=".partial"))
    try:
        make(partial)
        sync(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_directory(store)
    finally:
        remove(partial)
    return folder, False


def publish(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    link_or_copy(source, target)


def prunable(store: Path) -> list[Path]:
    if not store.is_dir():
        return []
    return [path for path in sorted(store.iterdir()) if path.is_dir() and not _in_use(path)]


def _in_use(folder: Path) -> bool:
    files = list(folder.iterdir())
    newest_s = max(path.stat().st_mtime for path in (folder, *files))
    young = time.time() - newest_s < ABANDONED_S
    shared = any(path.stat().st_nlink > 1 for path in files)
    return young or (shared and not folder.name.startswith("."))
