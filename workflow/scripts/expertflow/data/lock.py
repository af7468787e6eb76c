"""Pin the content of an expert's sources when Snakemake parses the workflow.

Everything downstream depends on the lock file, which changes only with the content, not when a file
is touched. Hashes are cached by size, modification time and inode to keep parsing fast.
"""

import contextlib
import glob
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import canonical_json, sha256_file, write_text_if_changed
from expertflow.core.format import gb
from expertflow.core.records import to_json, write_record
from expertflow.data.cache import find_revision
from expertflow.data.records import ExpertLock, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.base import Pins
from expertflow.data.sources.registry import open_source

log = logging.getLogger(__name__)
SLOW_HASH_BYTES = 1 << 30


class HashCache:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, list[Any]] = {}
        if path.is_file():
            try:
                self.known = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                log.warning("%s is damaged; hashing all sources again", path)

    def sha256(self, path: Path) -> str:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        key = str(path.resolve())
        entry = self.known.get(key)
        if entry is None or entry[:3] != stamp:
            if stat.st_size > SLOW_HASH_BYTES:
                log.warning("hashing %s (%s), once", path, gb(stat.st_size))
            entry = [*stamp, sha256_file(path)]
            self.known[key] = entry
        return str(entry[3])

    def save(self) -> None:
        write_text_if_changed(self.path, canonical_json(self.known))


def lock_sources(
    expert: str,
    sources: tuple[SourceSpec, ...],
    *,
    hashes: HashCache,
    generator_digest: Callable[[str], str],
    bundled: ExpertLock | None = None,
) -> ExpertLock:
    """Pin all sources of an expert; DataError if one cannot be pinned.

    ``bundled``, the lock of the machine that prepared the data, stands in for missing raw data.
    """
    there = {} if bundled is None else {lock.name: lock for lock in bundled.sources}
    pins = Pins(hashes.sha256, generator_digest)
    locks = []
    for source in sources:
        old = there.get(source.name)
        if old is not None and old.kind != source.kind:
            old = None
        if old is not None and _is_absent(source):
            locks.append(replace(old, n_shards=source.n_shards or old.n_shards))
            continue
        lock = _lock(source, pins)
        if old is not None:
            _refuse_other_data(expert, lock, old)
            # File locations may differ.
            if _without_place(lock) == _without_place(old):
                lock = replace(old, n_shards=lock.n_shards)
        locks.append(lock)
    return ExpertLock(expert=expert, sources=tuple(locks))


def _lock(source: SourceSpec, pins: Pins) -> SourceLock:
    try:
        pinned = open_source(source).pin(pins)
    except (ConfigError, DataError) as error:
        raise type(error)(f"source {source.name}: {error}") from error
    if source.n_shards:
        pinned = replace(pinned, n_shards=source.n_shards)
    return SourceLock(name=source.name, kind=source.kind, **asdict(pinned))


def _is_absent(source: SourceSpec) -> bool:
    if source.path is None:
        return False
    place = Path(source.path).expanduser()
    # A broken symlink matches a pattern but does not exist.
    found = glob.glob(str(place), recursive=True)  # noqa: PTH207
    return not place.exists() and not any(Path(path).exists() for path in found)


def _without_place(lock: SourceLock) -> SourceLock:
    identity = {key: value for key, value in lock.identity.items() if key != "path"}
    files = tuple(replace(file, path="") for file in lock.files)
    return replace(lock, n_shards=0, identity=identity, files=files)


def _refuse_other_data(expert: str, lock: SourceLock, bundled: SourceLock) -> None:
    """Refuse raw data that differs from a bundle's: either may be the intended one."""
    place = lock.files[0].path if lock.files else lock.identity.get("path")
    files = [[file.sha256 for file in each.files] for each in (lock, bundled)]
    if place is not None and (files[0] != files[1] or lock.revision != bundled.revision):
        raise DataError(
            f"source {lock.name}: {place} differs from what the bundle of {expert} was made of;"
            f" move it away to go by the bundle, or delete results/{expert}/.bundle to go by it"
        )


def list_unresolved_hub_sources(sources: tuple[SourceSpec, ...]) -> list[str]:
    return [
        f"{source.id}@{source.revision or 'main'}"
        for source in sources
        if source.kind == "hub" and find_revision(str(source.id), source.revision) is None
    ]


def write_lock(path: Path, lock: ExpertLock) -> bool:
    """Write the lock if its content changed; return whether it was written.

    Rewriting a bundle's lock for its key order alone would make it newer than all built from it.
    """
    value = to_json(lock)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == value:
            return False
    write_record(path, value)
    return True
