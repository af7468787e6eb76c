"""Store tokens by their inputs, so that the same tokens are never computed twice.

Results are hard links into the store: instant, and without extra space.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from expertflow.core.files import hold_partial, link_or_copy, remove, sync, sync_directory

log = logging.getLogger(__name__)
# A job fills its folder, and links its results, within this time.
ABANDONED_S = 3600


def ensure_stored(
    store: Path, key: str, make: Callable[[Path], None], is_complete: Callable[[Path], bool]
) -> tuple[Path, bool]:
    """Return the folder of ``key``, filled by ``make`` if new or damaged, and whether it existed.

    Two jobs may make the same folder at once; both use the first one to finish.
    """
    folder = store / key
    if folder.is_dir():
        if is_complete(folder):
            return folder, True
        log.warning("%s is damaged; its tokens are computed again", folder)
        remove(folder)
    store.mkdir(parents=True, exist_ok=True)
    with hold_partial(folder) as (partial, _):
        partial.mkdir()
        make(partial)
        sync(partial)
        try:
            partial.rename(folder)
        # A folder that is not empty cannot be replaced: another job was faster.
        except OSError:
            if not folder.is_dir():
                raise
        sync_directory(store)
    return folder, False


def publish_file(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    link_or_copy(source, target)


def find_prunable(store: Path) -> list[Path]:
    if not store.is_dir():
        return []
    # Hidden folders belong to jobs that are still writing.
    return [path for path in sorted(store.glob("[!.]*")) if path.is_dir() and not _in_use(path)]


def _in_use(folder: Path) -> bool:
    files = list(folder.iterdir())
    newest_s = max(path.stat().st_mtime for path in (folder, *files))
    young = time.time() - newest_s < ABANDONED_S
    # A file that an expert uses has a second name.
    shared = any(path.stat().st_nlink > 1 for path in files)
    return young or shared
