"""Pin what an expert's sources contain, when Snakemake parses the workflow.

The lock is a file that changes only when the content behind it changes; everything downstream
depends on it. Touching a raw file changes nothing, editing one record does. Hashes are remembered
by size, time stamp and inode, so that parsing stays quick.
"""

import contextlib
import glob
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import canonical_json, sha256_file, write_text_if_changed
from expertflow.core.format import gb
from expertflow.core.records import to_json, write_record
from expertflow.data.formats.options import ReadOptions
from expertflow.data.records import ExpertLock, LockedFile, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.sources import git, hub, local
from expertflow.data.sources.git_options import GitOptions

log = logging.getLogger(__name__)
SLOW_HASH_BYTES = 1 << 30


# How a module says that it is a generator, without being imported.
GENERATOR = re.compile(r"^(def generate\(|generate = )", re.MULTILINE)


class HashCache:
    """Content hashes of files, remembered between runs in one JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, list[Any]] = {}
        if path.is_file():
            try:
                self.known = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                log.warning("%s is damaged; hashing all sources again", path)

    def sha256(self, path: Path) -> str:
        """Hash a file, or take the hash it had if size, time stamp and inode are the same."""
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
        """Write the cache if it learned something."""
        write_text_if_changed(self.path, canonical_json(self.known))


def lock_sources(
    expert: str,
    sources: tuple[SourceSpec, ...],
    *,
    hashes: HashCache,
    generator_digest: Callable[[str], str],
    bundled: ExpertLock | None = None,
) -> ExpertLock:
    """Pin all sources of an expert.

    ``generator_digest`` gives the code digest of a generator module: a changed generator is a
    changed source. ``bundled`` is the lock of the box that prepared the data, where that is
    another one: it stands in for raw data that is absent here.

    Raises:
        DataError: a source is not where the manifest says, or differs from the one bundled.
    """
    there = {} if bundled is None else {lock.name: lock for lock in bundled.sources}
    locks = []
    for source in sources:
        old = there.get(source.name)
        if old is not None and old.kind == source.kind and _is_absent(source):
            locks.append(replace(old, n_shards=source.n_shards or old.n_shards))
            continue
        lock = _lock(source, hashes, generator_digest)
        if old is not None and old.kind == source.kind:
            _refuse_other_data(expert, lock, old)
            # They may differ in where the files lie.
            if _placeless(lock) == _placeless(old):
                lock = replace(old, n_shards=lock.n_shards)
        locks.append(lock)
    return ExpertLock(expert=expert, sources=tuple(locks))


def _lock(
    source: SourceSpec, hashes: HashCache, generator_digest: Callable[[str], str]
) -> SourceLock:
    n_shards = 1
    revision: str | None = None
    files: tuple[LockedFile, ...] = ()
    identity: dict[str, Any] = {}
    if source.kind == "local":
        files = _lock_files(source, hashes)
        n_shards = local.count_shards(files)
    elif source.kind == "hub":
        # The commit follows when it is fetched. A cached one is not written here: the lock would
        # change by the download itself, and all that was just made would be made again.
        n_shards, revision = hub.DEFAULT_SHARDS, source.revision
        identity = {"id": source.id, "config": source.config, "split": source.split}
    elif source.kind == "git":
        path = Path(str(source.path)).expanduser()
        revision = _lock_commit(source, path)
        identity = {"path": str(path), "options": source.options}
    else:
        identity = _lock_generator(source, generator_digest)
    return SourceLock(
        name=source.name,
        kind=source.kind,
        n_shards=source.n_shards or n_shards,
        revision=revision,
        identity=identity,
        files=files,
    )


def _is_absent(source: SourceSpec) -> bool:
    """Tell whether nothing is where a source of files should be; others lie nowhere."""
    if source.kind not in ("local", "git"):
        return False
    place = Path(str(source.path)).expanduser()
    # A link to what is gone matches a pattern, and is nothing.
    found = glob.glob(str(place), recursive=True)  # noqa: PTH207
    return not place.exists() and not any(Path(path).exists() for path in found)


def _placeless(lock: SourceLock) -> SourceLock:
    identity = {key: value for key, value in lock.identity.items() if key != "path"}
    files = tuple(replace(file, path="") for file in lock.files)
    return replace(lock, n_shards=0, identity=identity, files=files)


def _refuse_other_data(expert: str, lock: SourceLock, bundled: SourceLock) -> None:
    """Refuse raw data beside a bundle that was made of other raw data: either may be meant."""
    files = [[file.sha256 for file in each.files] for each in (lock, bundled)]
    pinned_here = lock.kind in ("local", "git")
    if pinned_here and (files[0] != files[1] or lock.revision != bundled.revision):
        place = lock.files[0].path if lock.files else lock.identity["path"]
        raise DataError(
            f"source {lock.name}: {place} differs from what the bundle of {expert} was made of;"
            f" move it away to go by the bundle, or delete results/{expert}/.bundle to go by it"
        )


def unresolved_hub_sources(sources: tuple[SourceSpec, ...]) -> list[str]:
    """Name the hub data sets whose commit neither the manifest nor the local cache knows."""
    return [
        f"{source.id}@{source.revision or 'main'}"
        for source in sources
        if source.kind == "hub" and hub.cached_revision(str(source.id), source.revision) is None
    ]


def write_lock(path: Path, lock: ExpertLock) -> bool:
    """Write the lock unless the file says the same; return whether it was written.

    The order of keys does not count: a lock that came with a bundle has them in its own order, and
    written anew it would be newer than all that was made from it.
    """
    value = to_json(lock)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == value:
            return False
    write_record(path, value)
    return True


def _lock_files(source: SourceSpec, hashes: HashCache) -> tuple[LockedFile, ...]:
    try:
        ReadOptions.from_manifest(source.options)
    except ConfigError as error:
        raise ConfigError(f"source {source.name}: {error}") from error
    files = []
    for path in local.find_files(str(source.path), source=source.name):
        file_format, compression = local.format_of(path)
        files.append(
            LockedFile(
                path=str(path),
                format=file_format,
                compression=compression,
                n_bytes=path.stat().st_size,
                sha256=hashes.sha256(path),
            )
        )
    return tuple(files)


def _lock_commit(source: SourceSpec, path: Path) -> str:
    try:
        GitOptions.from_manifest(source.options)
        if not path.exists():
            raise DataError(f"no repository at {path}; correct the source's path")
        return git.head(path, ref=source.options.get("ref", "HEAD"))
    except DataError as error:
        raise DataError(f"source {source.name}: {error}") from error


def _lock_generator(source: SourceSpec, generator_digest: Callable[[str], str]) -> dict[str, Any]:
    folder = Path(__file__).with_name("sources") / "generated"
    files = folder.glob("*.py")
    known = sorted(path.stem for path in files if GENERATOR.search(path.read_text("utf-8")))
    if source.generator not in known:
        raise ConfigError(
            f"source {source.name}: no generator {source.generator!r}; use one of"
            f" {', '.join(known)}"
        )
    return {
        "generator": source.generator,
        "n_documents": source.n_documents,
        "seed": source.seed,
        "code": generator_digest(str(source.generator)),
    }
