"""Bring a source's records onto this disk and say what is there.

Local files stay where they are and are checked against the lock; hub data sets come through the
library's cache; git histories and generators write JSON Lines.
"""

import importlib
import json
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.records import Artefact, DataFile, SourceLock, SourceRecord, SourceSpec
from expertflow.data.sources import git, hub, local

GENERATORS = "expertflow.data.sources.generated"


def fetch_source(source: SourceSpec, lock: SourceLock, directory: Path) -> SourceRecord:
    """Make a local, hub or git source readable; only git writes into ``directory``.

    Raises:
        DataError: a file changed since the lock was taken, or the source cannot be read.
    """
    directory.mkdir(parents=True, exist_ok=True)
    revision = lock.revision
    if source.kind == "local":
        files = [_checked(Path(f.path), f.sha256) for f in lock.files]
    elif source.kind == "hub":
        revision, files = hub.fetch(source)
    else:
        files = [_extract_commits(source, lock, directory)]
    return _record(source, lock, revision=revision, files=files, artefacts={})


def generate_source(source: SourceSpec, lock: SourceLock, directory: Path) -> SourceRecord:
    """Run a generator into ``directory``.

    Generators are imported by name, so that editing one of them does not touch the others' data:
    the lock holds the digest of the one that is used.
    """
    with replacing(directory) as partial:
        partial.mkdir(parents=True)
        module = importlib.import_module(f"{GENERATORS}.{source.generator}")
        artefacts = module.generate(
            n_documents=int(source.n_documents or 0), seed=int(source.seed or 0), directory=partial
        )
        names = {name: path.relative_to(partial) for name, path in artefacts.items()}
    files = [_jsonl(directory / "records.jsonl")]
    made = {
        name: Artefact(path=str(directory / path), sha256=_content(directory / path))
        for name, path in names.items()
    }
    return _record(source, lock, revision=None, files=files, artefacts=made)


def _content(path: Path) -> str:
    """Pin a file by its bytes, a repository by its head: how git packs objects is git's."""
    return sha256_file(path) if path.is_file() else git.head(path)


def _record(
    source: SourceSpec,
    lock: SourceLock,
    *,
    revision: str | None,
    files: list[DataFile],
    artefacts: dict[str, Artefact],
) -> SourceRecord:
    if not files or all(file.n_bytes == 0 for file in files):
        raise DataError(f"source {source.name}: it holds no records; check its path and filters")
    return SourceRecord(
        name=source.name,
        kind=source.kind,
        revision=revision,
        licence=source.licence,
        n_shards=lock.n_shards,
        files=tuple(files),
        artefacts=artefacts,
    )


def _checked(path: Path, sha256: str) -> DataFile:
    if not path.is_file():
        raise DataError(f"{path}: gone since the workflow started; put it back and run again")
    if sha256_file(path) != sha256:
        raise DataError(f"{path}: changed since the workflow started; run again to take it in")
    return local.data_file(path, sha256=sha256)


def _extract_commits(source: SourceSpec, lock: SourceLock, directory: Path) -> DataFile:
    output = directory / "records.jsonl"
    repository = Path(str(source.path)).expanduser()
    if git.head(repository, ref=source.options.get("ref", "HEAD")) != lock.revision:
        raise DataError(f"{repository}: moved on since the workflow started; run again to follow")
    with replacing(output) as partial, partial.open("w", encoding="utf-8") as stream:
        for commit in git.extract_commits(repository, options=source.options):
            stream.write(json.dumps(commit, ensure_ascii=False) + "\n")
    return _jsonl(output)


def _jsonl(path: Path) -> DataFile:
    with path.open("rb") as stream:
        n_records = sum(1 for line in stream if line.strip())
    return DataFile(
        path=str(path),
        format="jsonl",
        n_bytes=path.stat().st_size,
        n_records=n_records,
        sha256=sha256_file(path),
    )
