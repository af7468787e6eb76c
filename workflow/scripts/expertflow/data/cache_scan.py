"""List all data sets of the Hugging Face caches: revisions, sizes, licences, what is prepared."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from expertflow.data import cache


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRevision:
    """One commit of a data set; ``refs`` are the branches and tags that point to it."""

    commit: str
    refs: tuple[str, ...]
    n_files: int
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedConfig:
    """One config of a data set as Arrow files."""

    config: str
    commit: str
    n_records_by_split: dict[str, int]
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedDataset:
    """A data set of the caches.

    ``n_bytes`` counts what was downloaded, each blob once. ``last_used`` is the newest access the
    file system noted (ISO 8601, UTC); many note it once a day only.
    """

    id: str
    revisions: tuple[CachedRevision, ...]
    n_bytes: int
    licence: str | None
    prepared: tuple[PreparedConfig, ...]
    n_prepared_bytes: int
    last_used: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """Both caches; a folder that is not there is named and not an error."""

    hub_cache: str
    hub_cache_exists: bool
    prepared_cache: str
    prepared_cache_exists: bool
    datasets: tuple[CachedDataset, ...]
    damaged: tuple[str, ...]


def scan_caches() -> CacheReport:
    """List both caches, sorted by id."""
    hub, prepared = cache.hub_cache(), cache.prepared_cache()
    repositories, damaged = _scan_hub(hub)
    roots = {path.name: path for path in sorted(prepared.glob("*")) if path.is_dir()}
    rows = []
    for repository in repositories:
        root = roots.pop(cache.prepared_root(repository.repo_id).name, None)
        rows.append(_dataset(repository.repo_id, repository, root))
    # What is left was prepared from files that are no longer there; its id is read off the folder.
    rows += [_dataset(name.replace("___", "/"), None, root) for name, root in roots.items()]
    return CacheReport(
        hub_cache=str(hub),
        hub_cache_exists=hub.is_dir(),
        prepared_cache=str(prepared),
        prepared_cache_exists=prepared.is_dir(),
        datasets=tuple(sorted((row for row in rows if row is not None), key=lambda row: row.id)),
        damaged=damaged,
    )


def _scan_hub(folder: Path) -> tuple[list[Any], tuple[str, ...]]:
    if not folder.is_dir():
        return [], ()
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(folder)
    damaged = (str(warning) for warning in found.warnings)
    ours = [text for text in damaged if re.search(r"datasets--", text)]
    return [r for r in found.repos if r.repo_type == "dataset"], tuple(sorted(ours))


def _dataset(name: str, repository: Any, root: Path | None) -> CachedDataset | None:
    prepared = cache.list_prepared(root) if root else []
    if repository is None and not prepared:
        return None
    revisions = _revisions(repository) if repository else ()
    return CachedDataset(
        id=name,
        revisions=revisions,
        n_bytes=repository.size_on_disk if repository else 0,
        licence=_licence(name, revisions),
        prepared=tuple(
            PreparedConfig(
                config=p.config,
                commit=p.commit,
                n_records_by_split=p.n_records_by_split,
                n_bytes=p.n_bytes,
            )
            for p in prepared
        ),
        n_prepared_bytes=sum(p.n_bytes for p in prepared),
        last_used=_last_used(repository, (p.folder for p in prepared)),
    )


def _revisions(repository: Any) -> tuple[CachedRevision, ...]:
    rows = (
        CachedRevision(
            commit=revision.commit_hash,
            refs=tuple(sorted(revision.refs)),
            n_files=revision.nb_files,
            n_bytes=revision.size_on_disk,
        )
        for revision in repository.revisions
    )
    return tuple(sorted(rows, key=lambda row: (not row.refs, row.refs, row.commit)))


def _licence(name: str, revisions: tuple[CachedRevision, ...]) -> str | None:
    """Give the licence of the card, of the main branch where it is here."""
    stated = (cache.card_licence(cache.card_data(name, r.commit)) for r in revisions)
    return next((licence for licence in stated if licence), None)


def _last_used(repository: Any, prepared: Iterable[Path]) -> str | None:
    stamps = [path.stat().st_atime for folder in prepared for path in folder.glob("*.arrow")]
    stamps += [repository.last_accessed] if repository else []
    if not stamps:
        return None
    return datetime.fromtimestamp(max(stamps), tz=UTC).isoformat(timespec="seconds")
