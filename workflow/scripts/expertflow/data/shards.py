"""Describe an expert's data sets, and name the shards that prepare them."""

import logging
from itertools import pairwise
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.records import fill_record
from expertflow.data.records import DatasetManifest, DatasetSource, SourceRecord

log = logging.getLogger(__name__)

SHARDS_PER_TOKEN_SHARD = 16


def shard_names(n_shards: int) -> list[str]:
    return [f"{index:03d}" for index in range(n_shards)]


def token_shards(n_shards: int) -> dict[str, list[str]]:
    """Map each tokenizing job to several shards: loading a vocabulary takes as long as a few."""
    names = shard_names(n_shards)
    n_runs = -(-n_shards // SHARDS_PER_TOKEN_SHARD)
    # As even as possible: 17 shards make runs of 8 and 9, not of 16 and 1.
    edges = [n_shards * i // n_runs for i in range(n_runs + 1)]
    runs = (names[start:end] for start, end in pairwise(edges))
    return dict(zip(shard_names(n_runs), runs, strict=True))


def find_datasets(
    *, expert: str, preset: str, licenses: dict[str, str | None], sources: list[SourceRecord]
) -> DatasetManifest:
    """Describe an expert's sources; DataError if a file is missing.

    A license in ``licenses``, the manifest's by source, wins over the data set card's.
    """
    rows = []
    for source in sources:
        for file in source.files:
            if not Path(file.path).exists():
                raise DataError(f"{file.path}: missing from source {source.name}; fetch it again")
        license, license_notes = _choose_license(source, licenses[source.name])
        notes = {note for file in source.files for note in file.notes}
        counts = [file.n_records for file in source.files]
        rows.append(
            fill_record(
                DatasetSource,
                source,
                license=license,
                n_files=len(source.files),
                n_bytes=sum(file.n_bytes for file in source.files),
                # One uncounted file leaves the sum unknown.
                n_records=None if None in counts else sum(n for n in counts if n is not None),
                sha256=sha256_json([file.sha256 for file in source.files]),
                notes=tuple(sorted({*notes, *license_notes})),
            )
        )
    return DatasetManifest(expert=expert, preset=preset, sources=tuple(rows))


def _choose_license(source: SourceRecord, stated: str | None) -> tuple[str | None, list[str]]:
    card = source.card_license
    if stated is None:
        return card, [f"license {card}: from the data set card"] if card else []
    if card is None or card.casefold() == stated.casefold():
        return stated, []
    log.warning(
        "source %s: the manifest states license %s, the data set card %s; check which applies",
        *(source.name, stated, card),
    )
    return stated, [f"the data set card says {card}"]
