"""Hugging Face data sets: pinned to a commit, read as Arrow files from the libraries' own caches.

What is prepared is read without asking anyone. What is only downloaded is prepared without a
network; the hub is asked for the rest. No code that comes with a data set is ever run.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.data import cache
from expertflow.data.cache import cached_revision as cached_revision
from expertflow.data.records import DataFile
from expertflow.data.settings import SourceSpec
from expertflow.data.sources import hub_prepare
from expertflow.data.sources.hub_download import open_snapshot, set_up_libraries
from expertflow.data.sources.hub_errors import one_line

log = logging.getLogger(__name__)
DEFAULT_SHARDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HubData:
    """A data set on this disk, with the licence that its card states."""

    revision: str
    card_licence: str | None
    files: list[DataFile]


def fetch(source: SourceSpec) -> HubData:
    """Find a data set in the caches or bring it there; give its commit and its Arrow files.

    Raises:
        DataError: the hub cannot be reached, or the data set, revision, config or split is unknown.
    """
    repository = str(source.id)
    prepared = cache.find_source(source)
    notes: list[str] = []
    if prepared is None:
        with one_line(source):
            set_up_libraries()
            snapshot = open_snapshot(source, cached_revision(repository, source.revision))
            if not snapshot.is_listed:
                notes.append("the hub was out of reach: the cached files are taken to be all")
                log.warning("%s: %s", repository, notes[0])
            prepared = hub_prepare.prepare(source, snapshot)
    hub_prepare.check_split(source, list(prepared.n_records_by_split))
    log.info("%s: commit %s, %s", repository, prepared.commit, prepared.folder)
    licence = cache.card_licence(cache.card_data(repository, prepared.commit))
    paths = prepared.files(source.split or "train")
    files = [_arrow_file(path, tuple(sorted(notes))) for path in paths]
    _check_count(source, prepared, files)
    return HubData(revision=prepared.commit, card_licence=licence, files=files)


def _arrow_file(path: Path, notes: tuple[str, ...]) -> DataFile:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            n_records = sum(batch.num_rows for batch in pa.ipc.open_stream(source))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: damaged; delete its folder and fetch again") from error
    return DataFile(
        path=str(path),
        format="arrow",
        compression=None,
        n_bytes=path.stat().st_size,
        n_records=n_records,
        sha256=sha256_file(path),
        notes=notes,
    )


def _check_count(source: SourceSpec, prepared: cache.Prepared, files: list[DataFile]) -> None:
    there = sum(file.n_records or 0 for file in files)
    stated = prepared.n_records_by_split[source.split or "train"]
    if there != stated:
        raise DataError(
            f"{prepared.folder}: {there} of {stated} records are there; delete the folder and"
            " fetch again"
        )
