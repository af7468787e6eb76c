"""List an expert's data sets and plan the jobs that will prepare them."""

from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.data.records import (
    DatasetManifest,
    DatasetSource,
    ExpertLock,
    ShardPlan,
    SourceRecord,
)


def shard_names(n_shards: int) -> list[str]:
    """Name the shards of a source so that they sort in their order."""
    return [f"{index:03d}" for index in range(n_shards)]


def find_datasets(
    *,
    expert: str,
    preset: str,
    lock: ExpertLock,
    sources: list[SourceRecord],
) -> DatasetManifest:
    """Describe every source of an expert and cut each into shards.

    Raises:
        DataError: a source's file is no longer there.
    """
    rows = []
    for source in sources:
        for file in source.files:
            if not Path(file.path).exists():
                raise DataError(f"{file.path}: source {source.name} lost it; fetch it again")
        counts = [file.n_records for file in source.files]
        rows.append(
            DatasetSource(
                name=source.name,
                kind=source.kind,
                revision=source.revision,
                licence=source.licence,
                n_files=len(source.files),
                n_bytes=sum(file.n_bytes for file in source.files),
                n_records=None if None in counts else sum(n for n in counts if n is not None),
                sha256=sha256_json([file.sha256 for file in source.files]),
                notes=tuple(sorted({note for file in source.files for note in file.notes})),
            )
        )
    shards = tuple(
        ShardPlan(source=source.name, shard=name, index=index, n_shards=source.n_shards)
        for source in lock.sources
        for index, name in enumerate(shard_names(source.n_shards))
    )
    return DatasetManifest(expert=expert, preset=preset, sources=tuple(rows), shards=shards)
