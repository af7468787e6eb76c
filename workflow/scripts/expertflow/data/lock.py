"""Pin the content of an expert's sources when Snakemake parses the workflow.

Everything downstream depends on the lock file, which changes only with the content, not when a file
is touched. Hashes are cached to keep parsing fast.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import asdict, replace

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import sha256_file, sidecar_of
from expertflow.core.hashes import HashCache
from expertflow.core.records import read_record, to_json, write_record
from expertflow.core.sidecars import Sidecar, write_sidecar
from expertflow.data.cache import find_revision
from expertflow.data.records import ExpertLock, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.base import Pins
from expertflow.data.sources.local import match_files
from expertflow.data.sources.registry import open_source


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
    bundled_locks = {} if bundled is None else {lock.name: lock for lock in bundled.sources}
    pins = Pins(hashes.sha256, generator_digest)
    locks = []
    for source in sources:
        old = bundled_locks.get(source.name)
        # The manifest now uses this name for another kind of source.
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
    return not place.exists() and not match_files(place)


def _without_place(lock: SourceLock) -> SourceLock:
    # The number of shards only affects speed, and paths differ between machines.
    identity = {key: value for key, value in lock.identity.items() if key != "path"}
    files = tuple(replace(file, path="") for file in lock.files)
    return replace(lock, n_shards=0, identity=identity, files=files)


def _refuse_other_data(expert: str, lock: SourceLock, bundled: SourceLock) -> None:
    # Either may be the intended one.
    place = lock.files[0].path if lock.files else lock.identity.get("path")
    files = [[file.sha256 for file in each.files] for each in (lock, bundled)]
    if place is not None and (files[0] != files[1] or lock.revision != bundled.revision):
        raise DataError(
            f"source {lock.name}: {place} differs from the data in {expert}'s bundle;"
            f" move it away to use the bundle's, or delete results/{expert}/.bundle to use yours"
        )


def list_unresolved_hub_sources(sources: tuple[SourceSpec, ...]) -> list[str]:
    return [
        f"{source.id}@{source.revision or 'main'}"
        for source in sources
        if source.kind == "hub" and find_revision(str(source.id), source.revision) is None
    ]


def write_lock(path: Path, lock: ExpertLock) -> bool:
    """Write lock and sidecar if the content changed; return whether the lock was written.

    Rewriting a bundle's lock just for its key order would make it newer than all its outputs.
    """
    value = to_json(lock)
    is_new = True
    with contextlib.suppress(OSError, ValueError):
        is_new = json.loads(path.read_text(encoding="utf-8")) != value
    if is_new:
        write_record(path, value)
    if is_new or not _has_sidecar(path):
        write_sidecar(path, spec="", code="", rule="lock")
    return is_new


def _has_sidecar(path: Path) -> bool:
    with contextlib.suppress(DataError):
        return read_record(Sidecar, sidecar_of(path)).sha256 == sha256_file(path)
    return False
