"""Hugging Face data sets, pinned to a commit and read as Arrow files from the library caches.

Prepared data is read without the network, and downloaded data prepared without it; anything else
comes from the hub. No code from a data set is ever run. The split of each file follows from the
card or file names, which ``datasets`` resolves on a folder. So it gets one with every file of the
commit: a link if the file is local, else an empty file. That way only selected files are
downloaded.
"""

import glob
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

from msgspec.structs import replace

from expertflow.core.disk import check_space
from expertflow.core.errors import DataError
from expertflow.core.format import size
from expertflow.core.progress import show_activity
from expertflow.core.strict_json import iter_values
from expertflow.data import cache
from expertflow.data.read import describe_file
from expertflow.data.records import SourceLock
from expertflow.data.settings import SourceOptions, SourceSpec
from expertflow.data.sources import hub_errors, hub_rows
from expertflow.data.sources.base import DataSource, Fetched, Found, Pinned, Pins

log = logging.getLogger(__name__)
DEFAULT_SHARDS = 4
KNOCK_TIMEOUT_S = 30.0
BUILDERS = ("arrow", "csv", "json", "parquet", "text")
# Small files that describe how to read a data set's other files.
DESCRIPTIONS = (cache.CARD, cache.CONFIGS, "dataset_infos.json")
NUMBERED = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<total>\d{5})(?P<rest>.*)")


class HubOptions(SourceOptions, frozen=True, kw_only=True):
    data_dir: str | None = None
    data_files: Any = None


class CachedCommit(NamedTuple):
    """A commit of a data set: file sizes by path, and the folder of local files.

    ``is_listed`` is false if only the local files are known, not all of the commit's.
    """

    folder: Path
    n_bytes_by_path: dict[str, int]
    is_listed: bool

    def find_missing(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if not (self.folder / path).exists()]

    def link_into(self, folder: Path, paths: Iterable[str]) -> None:
        for path in paths:
            place, real = folder / path, self.folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            if real.exists():
                place.symlink_to(real.resolve())
            else:
                place.touch()


class HubDataset(DataSource):
    kind = "hub"
    required = ("id",)
    optional = ("revision", "config", "split")
    option_type = HubOptions

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self.repository = str(spec.id)
        self.split, self.rows = hub_rows.parse_split(spec.split or "train")

    def look_up(self) -> Found:
        commit = cache.find_revision(self.repository, self.spec.revision)
        license = cache.card_license(cache.card_data(self.repository, commit))
        prepared = cache.find_source(self.spec)
        if prepared is not None:
            n_bytes = sum(path.stat().st_size for path in prepared.files(self.split))
            n_records = prepared.n_records_by_split.get(self.split)
            return Found("prepared", n_bytes, n_records, license)
        folder = cache.snapshot_folder(self.repository, commit) if commit else None
        files = [path for path in folder.rglob("*") if path.is_file()] if folder else []
        if all(path.name == cache.CARD for path in files):
            return Found("missing", license=license)
        return Found("downloaded", sum(path.stat().st_size for path in files), license=license)

    def pin(self, pins: Pins) -> Pinned:
        """Pin the manifest's revision, not its current commit.

        With a cached commit, the download itself would change the lock, and everything would be
        rebuilt.
        """
        spec = self.spec
        identity = {"id": spec.id, "config": spec.config, "split": spec.split}
        return Pinned(n_shards=DEFAULT_SHARDS, revision=spec.revision, identity=identity)

    def fetch(self, lock: SourceLock | None, directory: Path | None) -> Fetched:
        """Find a data set in the caches or download it, as Arrow files; DataError if neither."""
        prepared, split = cache.find_source(self.spec), self.split
        notes: tuple[str, ...] = ()
        if self.rows is not None:
            notes = (f"only rows {self.rows} of split {split}",)
        if prepared is None:
            with hub_errors.one_line(self.spec):
                _set_up_libraries()
                commit = _open_commit(self.repository, self.spec.revision)
                if not commit.is_listed:
                    notes += ("the hub was unreachable: the cached files are assumed complete",)
                    log.warning("%s: %s", self.repository, notes[-1])
                prepared = self._prepare(commit)
        counts = prepared.n_records_by_split
        if split not in counts:
            raise DataError(f"source {self.spec.name}: {self._no_split(counts)}")
        log.info("%s: commit %s, %s", self.repository, prepared.commit, prepared.folder)
        files = []
        with suppress(DataError):
            files += [replace(describe_file(p), notes=notes) for p in prepared.files(split)]
        if sum(file.n_records or 0 for file in files) != counts[split]:
            raise DataError(
                f"{prepared.folder}: damaged, or without all {counts[split]} records of split"
                f" {split}; delete the folder and fetch again"
            )
        license = cache.card_license(cache.card_data(self.repository, prepared.commit))
        return Fetched(tuple(files), revision=prepared.commit, card_license=license)

    def _prepare(self, commit: CachedCommit) -> cache.Prepared:
        from datasets import DownloadConfig
        from filelock import FileLock

        root = cache.find_prepared_root(self.repository)
        root.parent.mkdir(parents=True, exist_ok=True)
        # Another expert's job may need the same data set at the same time.
        with FileLock(f"{root}.lock"), tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch).resolve() / self.repository.split("/")[-1]
            commit.link_into(folder, commit.n_bytes_by_path)
            builder = self._builder(commit, folder)
            wanted = self._chosen_files(builder, folder)
            config = cache.config_folder(self.spec, builder.config.name)
            output = root / config / str(builder.config.version) / commit.folder.name
            try:
                return cache.read_prepared(output)
            except DataError:
                log.info("%s: preparing config %s", self.repository, builder.config.name)
            rows, whole = None, output
            if self.rows is not None:
                narrow = partial(hub_rows.narrow_builder, builder, self.repository, commit.folder)
                # It reads the ends of files from the hub: lost connections are retried here, too.
                retry = hub_errors.make_retrier(self.repository)
                wanted, rows = retry(narrow, self.split, self.rows)
                # A range is cut from a prepared table of the files that contain it; leftovers of
                # an earlier try are removed first.
                whole = root.with_name(f"{root.name}.whole")
                shutil.rmtree(whole, ignore_errors=True)
            if missing := commit.find_missing(wanted):
                _download(self.repository, commit, missing)
                commit.link_into(folder, missing)
            cache.check_blobs(commit.folder / path for path in wanted)
            downloads = cache.find_prepared_cache() / "downloads"
            builder.download_and_prepare(
                str(whole),
                download_mode="reuse_cache_if_exists",
                # The card counts the rows of all files.
                verification_mode=None if rows is None else "no_checks",
                download_config=DownloadConfig(cache_dir=downloads, delete_extracted=True),
            )
            if rows is not None:
                hub_rows.write_range(cache.read_prepared(whole), self.split, rows, output)
                shutil.rmtree(whole)
        prepared = cache.read_prepared(output)
        n_records = sum(prepared.n_records_by_split.values())
        log.info("%s: prepared, %d records", self.repository, n_records)
        return prepared

    def _builder(self, commit: CachedCommit, folder: Path) -> Any:
        import datasets
        from datasets.data_files import EmptyDatasetError
        from datasets.exceptions import DataFilesNotFoundError

        name, config = self.repository, self.spec.config
        chosen = {key: self.spec.options.get(key) for key in cache.READ_OPTIONS}
        # The builder would request any address, even of configs that are not chosen.
        values = iter_values([*cache.read_configs(folder), chosen])
        if address := next((v for v in values if isinstance(v, str) and "://" in v), None):
            raise DataError(
                f"{name} refers to an address ({address}), which is not read; download the file"
                " and use kind local"
            )
        try:
            builder = datasets.load_dataset_builder(
                str(folder), config, cache_dir=str(folder.parent / "cache"), **chosen
            )
        except (EmptyDatasetError, DataFilesNotFoundError, FileNotFoundError) as error:
            raise DataError(self._no_files(commit)) from error
        # RuntimeError: the data set has a script, which is never run.
        except (ImportError, RuntimeError, BadZipFile) as error:
            raise DataError(
                f"{name} has files that cannot be read here ({error}); choose others with config,"
                " options.data_files or revision refs/convert/parquet, or convert them and use kind"
                " local"
            ) from error
        except ValueError as error:
            known = sorted(datasets.get_dataset_config_names(str(folder)))
            if config in known or (config is None and len(known) < 2):
                raise
            fix = f"set it to one of {', '.join(known)}"
            raise DataError(f"{name}: config is {config or 'not set'}; {fix}") from error
        if builder.name not in BUILDERS:
            kinds = ", ".join(BUILDERS)
            raise DataError(f"{name} has {builder.name} files; only {kinds} are supported")
        return builder

    def _chosen_files(self, builder: Any, folder: Path) -> list[str]:
        """List a config's files; reject any outside: a card could name any path or address."""
        by_split = {str(split): list(files) for split, files in builder.config.data_files.items()}
        if self.split not in by_split:
            raise DataError(self._no_split(by_split))
        files = {os.path.normpath(str(file)) for files in by_split.values() for file in files}
        for file in sorted(files):
            if not file.startswith(f"{folder}{os.sep}"):
                raise DataError(
                    f"{self.repository} refers to a file outside itself ({Path(file).name}), which"
                    " is not read"
                )
        return sorted(Path(file).relative_to(folder).as_posix() for file in files)

    def _no_split(self, known: Iterable[str]) -> str:
        use = ", ".join(sorted(known))
        return f"{self.repository} has no split {self.split!r}; use one of {use}"

    def _no_files(self, commit: CachedCommit) -> str:
        chosen = {k: v for k, v in self.spec.options.items() if k in cache.READ_OPTIONS}
        under = f" under {chosen}" if chosen else ""
        what = f"{self.repository} has no {'/'.join(BUILDERS)} files{under}"
        if not commit.is_listed:
            return f"{what} in {commit.folder}, and the hub is unreachable; run once with a network"
        return f"{what}; correct the options, or use another data set"


def _set_up_libraries() -> None:
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    for name in ("huggingface_hub", "datasets"):
        library = logging.getLogger(name)
        # These libraries log through their own handlers, bypassing the filter below.
        library.handlers.clear()
        library.propagate = True
    for handler in logging.getLogger().handlers:
        handler.addFilter(hub_errors.hide_secrets)


def _open_commit(repository: str, wanted: str | None) -> CachedCommit:
    """Return what a data set contains, from the cache, else from the hub.

    With no hub and no cached listing, local files count as complete unless numbering shows gaps.
    """
    from huggingface_hub import HfApi

    commit = cache.find_revision(repository, wanted)
    if (known := _cached_commit(repository, commit)) and known.is_listed:
        return known
    revision = commit or wanted or "main"

    def ask() -> None:
        # Fails at once if unreachable; the download would silently use the cache.
        HfApi().dataset_info(repository, revision=revision, timeout=KNOCK_TIMEOUT_S)
        _download_files(repository, revision, DESCRIPTIONS)

    unreachable = None
    try:
        hub_errors.make_retrier(repository)(ask)
    except hub_errors.library_errors() as error:
        if not hub_errors.is_unreachable(error):
            raise
        unreachable = error
    found = _cached_commit(repository, commit or cache.find_revision(repository, wanted))
    if found is None:
        raise unreachable or DataError(f"{repository} has no files")
    if not found.is_listed and (lost := _lost_parts(found.n_bytes_by_path)):
        raise DataError(
            f"{found.folder}: part {lost[0]} of data set {repository} is missing and the hub"
            " cannot be reached; run once with a network"
        )
    return found


def _cached_commit(repository: str, commit: str | None) -> CachedCommit | None:
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
        return CachedCommit(folder, sizes, is_listed=False) if sizes else None
    # A listing could name files outside the folder.
    inside = [f for f in files if not {"/", "//", ".."}.intersection(Path(f.path).parts or "/")]
    found = CachedCommit(folder, {file.path: int(file.size) for file in inside}, is_listed=True)
    return None if found.find_missing(found.n_bytes_by_path.keys() & DESCRIPTIONS) else found


def _lost_parts(there: Iterable[str]) -> list[str]:
    """Return the missing parts of numbered files, such as train-00001-of-00002.parquet."""
    series = {match.groups() for match in filter(None, map(NUMBERED.fullmatch, there))}
    parts = {
        f"{stem}-{index:05d}-of-{total}{rest}"
        for stem, total, rest in series
        for index in range(int(total))
    }
    return sorted(parts.difference(there))


def _download_files(repository: str, revision: str, paths: Iterable[str]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(
        repository,
        repo_type="dataset",
        revision=revision,
        cache_dir=cache.hub_cache(),
        # They are read as patterns, and a name may contain brackets.
        allow_patterns=[glob.escape(path) for path in paths],
        max_workers=4,
    )


def _download(repository: str, commit: CachedCommit, missing: list[str]) -> None:
    sizes = {path: commit.n_bytes_by_path[path] for path in missing}
    what, n_bytes = f"{repository}@{commit.folder.name[:8]}", sum(sizes.values())
    check_space([(cache.hub_cache(), n_bytes, what)], fix=cache.MOVE_CACHE)
    log.info("%s: downloading %d files, %s", what, len(missing), size(n_bytes))
    blobs = commit.folder.parents[1] / "blobs"

    def describe() -> str:
        here = sum(sizes[path] for path in sizes.keys() - commit.find_missing(sizes))
        # A file renamed meanwhile is counted in the next report.
        with suppress(FileNotFoundError):
            here += sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
        return f"downloading {what}, {size(here)} of {size(n_bytes)}"

    with show_activity(describe):
        hub_errors.make_retrier(what)(_download_files, repository, commit.folder.name, missing)
    if still := commit.find_missing(missing):
        raise DataError(f"{still[0]} was not downloaded; run again")
    log.info("%s: downloaded", what)
