"""Hugging Face data sets, pinned to a commit and read as Arrow files from the library caches.

Prepared data is read without the network, and downloaded data prepared without it; the rest comes
from the hub. No code from a data set is ever run. The split of each file follows from the card or
file names, which ``datasets`` resolves on a folder. So it gets one with every file of the commit: a
link if the file is here, else an empty file. That way only selected files are downloaded.
"""

import glob
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zipfile import BadZipFile

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.data import cache
from expertflow.data.read import describe
from expertflow.data.records import SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.sources import hub_errors
from expertflow.data.sources.kind import Fetched, Found, Pinned, Pins

log = logging.getLogger(__name__)
DEFAULT_SHARDS = 4
REPORT_EVERY_S = 20.0
KNOCK_TIMEOUT_S = 30.0
BUILDERS = ("arrow", "csv", "json", "parquet", "text")
# Small files that describe how to read a data set's other files.
DESCRIPTIONS = (cache.CARD, ".huggingface.yaml", "dataset_infos.json")
NUMBERED = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<total>\d{5})(?P<rest>.*)")


class Snapshot(NamedTuple):
    """A commit of a data set: file sizes by path, and the folder of local files.

    ``is_listed`` is false if only the local files are known, not the commit's.
    """

    folder: Path
    n_bytes_by_path: dict[str, int]
    is_listed: bool

    def missing(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if not (self.folder / path).exists()]


def look_up(source: SourceSpec) -> Found:
    prepared = cache.find_source(source)
    if prepared is not None:
        split = source.split or "train"
        n_bytes = sum(path.stat().st_size for path in prepared.files(split))
        return Found("prepared", n_bytes, prepared.n_records_by_split.get(split))
    commit = cache.cached_revision(str(source.id), source.revision)
    folder = cache.snapshot_folder(str(source.id), commit) if commit else None
    files = [path for path in folder.rglob("*") if path.is_file()] if folder else []
    if all(path.name == cache.CARD for path in files):
        return Found("missing")
    return Found("downloaded", sum(path.stat().st_size for path in files))


def pin(source: SourceSpec, pins: Pins) -> Pinned:
    """Pin the manifest's revision, not its current commit.

    A cached commit would change the lock by the download itself, and everything would be rebuilt.
    """
    identity = {"id": source.id, "config": source.config, "split": source.split}
    return Pinned(n_shards=DEFAULT_SHARDS, revision=source.revision, identity=identity)


def fetch(source: SourceSpec, lock: SourceLock, directory: Path) -> Fetched:
    """Find a data set in the caches or download it, as Arrow files; DataError if neither."""
    repository, split = str(source.id), source.split or "train"
    prepared = cache.find_source(source)
    notes: tuple[str, ...] = ()
    if prepared is None:
        with hub_errors.one_line(source):
            _set_up_libraries()
            snapshot = _open_snapshot(source)
            if not snapshot.is_listed:
                notes = ("the hub was out of reach: the cached files are taken to be all",)
                log.warning("%s: %s", repository, notes[0])
            prepared = _prepare(source, snapshot)
    if split not in prepared.n_records_by_split:
        raise DataError(f"source {source.name}: {_no_split(source, prepared.n_records_by_split)}")
    log.info("%s: commit %s, %s", repository, prepared.commit, prepared.folder)
    files = []
    for path in prepared.files(split):
        try:
            files.append(replace(describe(path), notes=notes))
        except DataError as error:
            raise DataError(f"{path}: damaged; delete its folder and fetch again") from error
    there, stated = sum(file.n_records or 0 for file in files), prepared.n_records_by_split[split]
    if there != stated:
        raise DataError(
            f"{prepared.folder}: {there} of {stated} records are there; delete the folder and"
            " fetch again"
        )
    license = cache.card_license(cache.card_data(repository, prepared.commit))
    return Fetched(tuple(files), revision=prepared.commit, card_license=license)


def _set_up_libraries() -> None:
    import datasets
    import huggingface_hub.utils

    huggingface_hub.utils.disable_progress_bars()
    datasets.disable_progress_bars()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    for name in ("huggingface_hub", "datasets"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    for handler in logging.getLogger().handlers:
        handler.addFilter(hub_errors.hide_secrets)


def _open_snapshot(source: SourceSpec) -> Snapshot:
    """Return what a data set contains, from the cache, else from the hub.

    With no hub and no cached listing, local files count as complete unless numbering shows gaps.
    """
    from huggingface_hub import HfApi

    repository, revision = str(source.id), source.revision or "main"
    commit = cache.cached_revision(repository, revision)
    if (known := _cached_snapshot(repository, commit)) and known.is_listed:
        return known

    def ask() -> None:
        # Fails at once if unreachable; the download would silently use the cache.
        HfApi().dataset_info(repository, revision=commit or revision, timeout=KNOCK_TIMEOUT_S)
        _download_files(repository, commit or revision, DESCRIPTIONS)

    unreachable = None
    try:
        hub_errors.retrying(repository)(ask)
    except hub_errors.library_errors() as error:
        if not hub_errors.is_unreachable(error):
            raise
        unreachable = error
    found = _cached_snapshot(repository, commit or cache.cached_revision(repository, revision))
    if found is None:
        raise unreachable or DataError(f"{repository} holds no files")
    if not found.is_listed and (lost := missing_parts(found.n_bytes_by_path)):
        raise DataError(
            f"{found.folder}: part {lost[0]} of data set {repository} is missing and the hub"
            " cannot be reached; run once with a network"
        )
    return found


def _cached_snapshot(repository: str, commit: str | None) -> Snapshot | None:
    """Return the cached state of a commit; None if unknown or without a card."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    if commit is None:
        return None
    folder = cache.snapshot_folder(repository, commit)
    try:
        files = get_cached_repo_tree(
            repository, repo_type="dataset", revision=commit, cache_dir=cache.hub_cache()
        )
    except CachedRepoTreeNotFoundError:
        here = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in here}
        return Snapshot(folder, sizes, is_listed=False) if sizes else None
    sizes = {file.path: int(file.size) for file in files if _is_inside(file.path)}
    snapshot = Snapshot(folder, sizes, is_listed=True)
    return None if snapshot.missing(sizes.keys() & DESCRIPTIONS) else snapshot


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts


def missing_parts(paths: Iterable[str]) -> list[str]:
    """Return the missing parts of numbered files, such as train-00001-of-00002.parquet."""
    there = set(paths)
    series = {match.groups() for match in filter(None, map(NUMBERED.fullmatch, there))}
    return sorted(
        part
        for stem, total, rest in series
        for index in range(int(total))
        if (part := f"{stem}-{index:05d}-of-{total}{rest}") not in there
    )


def _download_files(repository: str, revision: str, paths: Iterable[str]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(
        repository,
        repo_type="dataset",
        revision=revision,
        cache_dir=cache.hub_cache(),
        allow_patterns=[glob.escape(path) for path in paths],
        max_workers=4,
    )


def _download(repository: str, snapshot: Snapshot, missing: list[str]) -> None:
    n_bytes = sum(snapshot.n_bytes_by_path[path] for path in missing)
    free = shutil.disk_usage(cache.hub_cache()).free
    if free < n_bytes:
        raise DataError(
            f"{repository} needs {_mb(n_bytes)} and {cache.hub_cache()} has {_mb(free)} left;"
            " free some, or set HF_HOME to another disk"
        )
    commit = snapshot.folder.name
    what = f"{repository}@{commit[:8]}"
    log.info("%s: downloading %d files, %s", what, len(missing), _mb(n_bytes))
    with _reported(what, snapshot, missing):
        hub_errors.retrying(what)(_download_files, repository, commit, missing)
    if still := snapshot.missing(missing):
        raise DataError(f"{still[0]} did not arrive; run again")
    log.info("%s: downloaded", what)


@contextmanager
def _reported(what: str, snapshot: Snapshot, missing: list[str]) -> Iterator[None]:
    sizes = {path: snapshot.n_bytes_by_path[path] for path in missing}
    blobs, done = snapshot.folder.parents[1] / "blobs", threading.Event()

    def watch() -> None:
        while not done.wait(REPORT_EVERY_S):
            # A file renamed meanwhile is counted in the next report.
            with suppress(FileNotFoundError):
                here = sum(sizes[path] for path in sizes.keys() - snapshot.missing(missing))
                here += sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
                log.info("%s: %s of %s", what, _mb(here), _mb(sum(sizes.values())))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


def _prepare(source: SourceSpec, snapshot: Snapshot) -> cache.Prepared:
    from datasets import DownloadConfig
    from filelock import FileLock

    repository = str(source.id)
    root = cache.prepared_root(repository)
    root.parent.mkdir(parents=True, exist_ok=True)
    # Another expert's job may need the same data set at the same time.
    with FileLock(f"{root}.lock"), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / repository.split("/")[-1]
        _lay_out(snapshot, snapshot.n_bytes_by_path, folder)
        builder = _builder(source, snapshot, folder)
        wanted = _chosen_files(source, builder, folder)
        config = cache.config_folder(source, builder.config.name)
        output = root / config / str(builder.config.version) / snapshot.folder.name
        try:
            return cache.read_prepared(output)
        except DataError:
            log.info("%s: preparing config %s", repository, builder.config.name)
        if missing := snapshot.missing(wanted):
            _download(repository, snapshot, missing)
            _lay_out(snapshot, missing, folder)
        downloads = cache.prepared_cache() / "downloads"
        builder.download_and_prepare(
            str(output),
            download_mode="reuse_cache_if_exists",
            download_config=DownloadConfig(cache_dir=downloads, delete_extracted=True),
        )
    prepared = cache.read_prepared(output)
    n_records = sum(prepared.n_records_by_split.values())
    log.info("%s: prepared, %d records", repository, n_records)
    return prepared


def _lay_out(snapshot: Snapshot, paths: Iterable[str], folder: Path) -> None:
    for path in paths:
        place, real = folder / path, snapshot.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if real.exists():
            place.symlink_to(real.resolve())
        else:
            place.touch()


def _builder(source: SourceSpec, snapshot: Snapshot, folder: Path) -> Any:
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError

    if (folder / f"{folder.name}.py").exists():
        raise DataError(
            f"{source.id} is made by a script of its own, which is never run; try revision"
            " refs/convert/parquet, where the hub keeps some of these as Parquet"
        )
    chosen = {key: source.options.get(key) for key in cache.READ_OPTIONS}
    try:
        builder = datasets.load_dataset_builder(
            str(folder), source.config, cache_dir=str(folder.parent / "cache"), **chosen
        )
    except (EmptyDatasetError, DataFilesNotFoundError, FileNotFoundError) as error:
        raise DataError(_no_files(source, snapshot)) from error
    except ImportError as error:
        raise DataError(
            f"{source.id} names an address, or files that need another package ({error}); choose"
            " others with config, or with data_files among the options"
        ) from error
    except BadZipFile as error:
        raise DataError(
            f"{source.id} holds zip archives, which are not read; unpack it and use kind local"
        ) from error
    except ValueError as error:
        known = sorted(datasets.get_dataset_config_names(str(folder)))
        if source.config is not None and source.config not in known:
            fault = f"no config {source.config!r}; use one of"
        elif source.config is None and len(known) > 1:
            fault = "several configs; set config to one of"
        else:
            raise
        raise DataError(f"{source.id} has {fault} {', '.join(known)}") from error
    if builder.name not in BUILDERS:
        kinds = ", ".join(BUILDERS)
        raise DataError(f"{source.id} holds {builder.name} files; only {kinds} are read")
    return builder


def _chosen_files(source: SourceSpec, builder: Any, folder: Path) -> list[str]:
    """List a config's files; refuse any outside it, as a card could name any path or address."""
    by_split = {str(split): list(files) for split, files in builder.config.data_files.items()}
    if (source.split or "train") not in by_split:
        raise DataError(_no_split(source, by_split))
    files = {os.path.normpath(str(file)) for files in by_split.values() for file in files}
    for file in sorted(files):
        if not file.startswith(f"{folder}{os.sep}"):
            raise DataError(
                f"{source.id} names a file outside of itself ({Path(file).name}); it is not read"
            )
    return sorted(Path(file).relative_to(folder).as_posix() for file in files)


def _no_split(source: SourceSpec, known: Iterable[str]) -> str:
    use = ", ".join(sorted(known))
    return f"{source.id} has no split {source.split or 'train'!r}; use one of {use}"


def _no_files(source: SourceSpec, snapshot: Snapshot) -> str:
    keys = [key for key in cache.READ_OPTIONS if key in source.options]
    chosen = " and ".join(f"{key} {source.options[key]!r}" for key in keys)
    what = f"{source.id} holds no {'/'.join(BUILDERS)} files{f' under {chosen}' if keys else ''}"
    if not snapshot.is_listed:
        return f"{what} in {snapshot.folder}, and the hub is out of reach; run once with a network"
    return f"{what}; {f'correct {keys[0]}' if keys else 'use another data set'}"
