"""Bring a source's records onto this disk and say what is there.

Local files stay where they are and are checked against the lock; hub data sets come through the
library's cache; git histories and generators write JSON Lines.
"""

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.records import Artefact, DataFile, SourceLock, SourceRecord
from expertflow.data.settings import FetchSpec, SourceSpec
from expertflow.data.sources import git, hub, local

GENERATORS = "expertflow.data.sources.generated"


def fetch_source(spec: FetchSpec, lock: SourceLock, directory: Path) -> SourceRecord:
    """Make a local, hub or git source readable; only git writes into ``directory``.

    Raises:
        DataError: a file changed since the lock was taken, or the source cannot be read.
    """
    source = spec.source
    directory.mkdir(parents=True, exist_ok=True)
    revision, card_licence = lock.revision, None
    if source.kind == "local":
        files = [_checked(Path(f.path), f.sha256, source.options) for f in lock.files]
    elif source.kind == "hub":
        revision, card_licence, files = hub.fetch(source)
    elif source.kind == "git":
        files = [_extract_commits(source, lock, directory)]
    else:
        raise DataError(f"source {source.name}: kind {source.kind!r} is not local, hub or git")
    return _record(spec, lock, files, revision=revision, card_licence=card_licence)


def generate_source(spec: FetchSpec, lock: SourceLock, directory: Path) -> SourceRecord:
    """Run a generator into ``directory``.

    Generators are imported by name, so that editing one of them does not touch the others' data:
    the lock holds the digest of the one that is used.
    """
    source = spec.source
    with replacing(directory) as partial:
        partial.mkdir(parents=True)
        module = importlib.import_module(f"{GENERATORS}.{source.generator}")
        artefacts = module.generate(
            n_documents=int(source.n_documents or 0), seed=int(source.seed or 0), directory=partial
        )
        paths = {name: directory / path.relative_to(partial) for name, path in artefacts.items()}
    made = {}
    for name, path in paths.items():
        # A repository is pinned by its head: how git packs objects is git's.
        content = sha256_file(path) if path.is_file() else git.head(path)
        made[name] = Artefact(path=str(path), sha256=content)
    return _record(spec, lock, [_jsonl(directory / "records.jsonl")], artefacts=made)


def _record(
    spec: FetchSpec,
    lock: SourceLock,
    files: list[DataFile],
    *,
    revision: str | None = None,
    card_licence: str | None = None,
    artefacts: dict[str, Artefact] | None = None,
) -> SourceRecord:
    if not files or all(file.n_bytes == 0 for file in files):
        raise DataError(f"source {lock.name}: it holds no records; check its path and filters")
    return SourceRecord(
        name=lock.name,
        preset=spec.preset,
        kind=lock.kind,
        revision=revision,
        card_licence=card_licence,
        n_shards=lock.n_shards,
        files=tuple(files),
        artefacts=artefacts or {},
    )


def _checked(path: Path, sha256: str, options: dict[str, Any]) -> DataFile:
    if not path.is_file():
        raise DataError(f"{path}: gone since the workflow started; put it back and run again")
    if sha256_file(path) != sha256:
        raise DataError(f"{path}: changed since the workflow started; run again to take it in")
    return local.describe(path, sha256=sha256, options=options)


def _extract_commits(source: SourceSpec, lock: SourceLock, directory: Path) -> DataFile:
    output = directory / "records.jsonl"
    repository = Path(str(source.path)).expanduser()
    if git.head(repository, ref=source.options.get("ref", "HEAD")) != lock.revision:
        raise DataError(f"{repository}: moved on since the workflow started; run again to follow")
    skipped: Counter[str] = Counter()
    with replacing(output) as partial, partial.open("w", encoding="utf-8") as stream:
        for commit in git.extract_commits(repository, options=source.options, skipped=skipped):
            stream.write(json.dumps(commit, ensure_ascii=False) + "\n")
    counts = ", ".join(f"{n} by {reason}" for reason, n in sorted(skipped.items()))
    return replace(_jsonl(output), notes=(f"commits left out: {counts}",) if counts else ())


def _jsonl(path: Path) -> DataFile:
    return local.describe(path, sha256=sha256_file(path), options={})
