"""The folder that rows are made in: gone after its run, also after one that was killed."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from expertflow.core.files import remove
from expertflow.core.locks import holder, sign, try_lock
from expertflow.core.records import Record

# Says that a folder is ours; held as long as anything of its run lives.
LOCK = ".expertflow-rows.lock"
REJECTED = "*.rejected.jsonl"


class Workplace(Record, frozen=True, kw_only=True):
    """A folder to make rows in, and its lock, which a child process may hold, too."""

    path: Path
    lock: IO[str]


@contextlib.contextmanager
def workplace(output: Path) -> Iterator[Workplace]:
    """Give a new folder beside ``output``, and remove those that killed runs have left there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    _sweep(output)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with (folder / LOCK).open("a+", encoding="utf-8") as lock:
            try_lock(lock)
            sign(lock)
            yield Workplace(path=folder, lock=lock)
    finally:
        remove(folder)


def keep_rejected(folder: Path, output: Path) -> Path | None:
    """Move rejected records out of a folder that will be gone, beside ``output``; say where to."""
    found = sorted(path for path in folder.rglob(REJECTED) if path.stat().st_size)
    if not found:
        return None
    kept = output.with_name(f"{output.name}.rejected")
    kept.mkdir(exist_ok=True)
    for old in kept.glob(REJECTED):
        old.unlink()
    for path in found:
        path.rename(kept / path.name)
    return kept


def _sweep(output: Path) -> None:
    ours = re.compile(rf"\.{re.escape(output.name)}\.\w{{8}}")
    for folder in sorted(output.parent.iterdir()):
        lock = folder / LOCK
        if not ours.fullmatch(folder.name) or folder.is_symlink() or not lock.is_file():
            continue
        with lock.open("a+", encoding="utf-8") as stream:
            # One that is not signed yet is about to be locked.
            is_left = bool(holder(stream)) and try_lock(stream) == "taken"
        if is_left:
            remove(folder)
