"""Get the files of a data set from the hub into its cache, and say how it goes.

A file that is there is not fetched again; a cut connection goes on where it stopped. What a commit
holds is listed once and kept in the cache, so that later on its completeness is known offline.
"""

import glob
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from expertflow.core.errors import DataError
from expertflow.data import cache
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.hub_errors import (
    SecretFilter,
    is_unreachable,
    library_errors,
    with_retries,
)

log = logging.getLogger(__name__)
REPORT_EVERY_S = 20.0
KNOCK_TIMEOUT_S = 30.0
# Small files that say how a data set's other files are to be read.
DESCRIPTIONS = (cache.CARD, ".huggingface.yaml", "dataset_infos.json")
NUMBERED = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<total>\d{5})(?P<rest>.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A data set at one commit: the sizes of its files by path, and where those here are.

    ``is_listed`` is false where only the files here are known, not what the commit holds.
    """

    repository: str
    commit: str
    n_bytes_by_path: dict[str, int]
    is_listed: bool

    @property
    def folder(self) -> Path:
        """Give the place of the files."""
        return cache.snapshot_folder(self.repository, self.commit)

    def missing(self, paths: list[str]) -> list[str]:
        """List which of these files are not here yet."""
        return [path for path in paths if not (self.folder / path).exists()]


def set_up_libraries() -> None:
    """Let the libraries log as this program does: no bars, no line a request, no secrets."""
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
        if not any(isinstance(f, SecretFilter) for f in handler.filters):
            handler.addFilter(SecretFilter())


def open_snapshot(source: SourceSpec, commit: str | None) -> Snapshot:
    """Find out what a data set holds: from the cache, else from the hub.

    Where the hub cannot be asked and the cache keeps no listing, the files here are taken for all.
    """
    repository = str(source.id)
    if commit is not None and (known := _listed(repository, commit)):
        if not known.missing(_descriptions(known)):
            return known
    unreachable: Exception | None = None
    try:
        with_retries(repository, lambda: _knock(source, commit))
        with_retries(repository, lambda: _fetch(source, commit, list(DESCRIPTIONS)))
    except library_errors() as error:
        if not is_unreachable(error):
            raise
        unreachable = error
    # The client itself takes what is here, without an error, where it knows the commit.
    commit = commit or cache.cached_revision(repository, source.revision)
    found = (_listed(repository, commit) or _unlisted(repository, commit)) if commit else None
    if found is None or found.missing(_descriptions(found)):
        raise unreachable or DataError(f"source {source.name}: {repository} holds no files")
    return found


def download(source: SourceSpec, snapshot: Snapshot, paths: list[str]) -> None:
    """Fetch the files that are missing, with a line of progress now and then."""
    missing = snapshot.missing(paths)
    n_bytes = sum(snapshot.n_bytes_by_path[path] for path in missing)
    _check_space(source, n_bytes)
    what = f"{snapshot.repository}@{snapshot.commit[:8]}"
    log.info("%s: downloading %d files, %s", what, len(missing), megabytes(n_bytes))
    blobs = cache.repository_folder(snapshot.repository) / "blobs"

    def arrived() -> int:
        here = sum(snapshot.n_bytes_by_path[p] for p in set(missing) - set(snapshot.missing(paths)))
        return here + sum(_size(path) for path in blobs.glob("*.incomplete"))

    with reported(what, n_bytes=n_bytes, arrived=arrived):
        with_retries(what, lambda: _fetch(source, snapshot.commit, missing))
    if still := snapshot.missing(paths):
        raise DataError(f"source {source.name}: {still[0]} did not arrive; run again")
    log.info("%s: downloaded", what)


def megabytes(n_bytes: int) -> str:
    """Write a size for a log.

    >>> megabytes(12_345_678)
    '12.3 MB'
    """
    return f"{n_bytes / 1e6:.1f} MB"


def _knock(source: SourceSpec, commit: str | None) -> None:
    """Ask for the data set at all: no answer shows at once here, elsewhere after half a minute."""
    from huggingface_hub import HfApi

    revision = commit or source.revision or "main"
    HfApi().dataset_info(str(source.id), revision=revision, timeout=KNOCK_TIMEOUT_S)


def _fetch(source: SourceSpec, commit: str | None, paths: list[str]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(
        str(source.id),
        repo_type="dataset",
        revision=commit or source.revision or "main",
        cache_dir=cache.hub_cache(),
        allow_patterns=[glob.escape(path) for path in paths],
        max_workers=4,
    )


def _listed(repository: str, commit: str) -> Snapshot | None:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(
            repository, repo_type="dataset", revision=commit, cache_dir=cache.hub_cache()
        )
    except CachedRepoTreeNotFoundError:
        return None
    sizes = {file.path: int(file.size) for file in files if _is_inside(file.path)}
    return Snapshot(repository=repository, commit=commit, n_bytes_by_path=sizes, is_listed=True)


def _unlisted(repository: str, commit: str) -> Snapshot | None:
    """Take the files here for the whole, unless their own numbering says that some are missing."""
    folder = cache.snapshot_folder(repository, commit)
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    if not paths:
        return None
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    if lost := missing_parts(list(sizes)):
        raise DataError(
            f"{folder}: part {lost[0]} of data set {repository} is missing and the hub cannot be"
            " reached; run once with a network"
        )
    return Snapshot(repository=repository, commit=commit, n_bytes_by_path=sizes, is_listed=False)


def missing_parts(paths: list[str]) -> list[str]:
    """Name the parts that are missing from numbered files.

    >>> missing_parts(["train-00000-of-00002.parquet"])
    ['train-00001-of-00002.parquet']
    """
    there, wanted = set(paths), set()
    for match in filter(None, map(NUMBERED.fullmatch, paths)):
        total = match["total"]
        for index in range(int(total)):
            wanted.add(f"{match['stem']}-{index:05d}-of-{total}{match['rest']}")
    return sorted(wanted - there)


def _descriptions(snapshot: Snapshot) -> list[str]:
    return [path for path in DESCRIPTIONS if path in snapshot.n_bytes_by_path]


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts


def _size(path: Path) -> int:
    """Give a file's size, 0 when it was renamed in the meantime."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _check_space(source: SourceSpec, n_bytes: int) -> None:
    folder = cache.hub_cache()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise DataError(
            f"source {source.name}: {source.id} needs {megabytes(n_bytes)} and {folder} has"
            f" {megabytes(free)} left; free some, or set HF_HOME to another disk"
        )


@contextmanager
def reported(what: str, *, n_bytes: int, arrived: Callable[[], int]) -> Iterator[None]:
    """Log every now and then how much of a download is here."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(REPORT_EVERY_S):
            log.info("%s: %s of %s", what, megabytes(arrived()), megabytes(n_bytes))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
