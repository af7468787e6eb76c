"""Drop repeats over all shards and split what is left into training and held-out documents.

The first occurrence in the order of the manifest stays. The split goes by the hash of a document's
group (by default its question), so a document keeps its side when data is added, and two answers to
one question never lie on both sides.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_file, sha256_text
from expertflow.data.records import DeduplicateSpec, DocumentsRecord, ShardRecord

SALT = "held out: "
KEEP = pa.schema(
    [
        ("source", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("held_out", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document in the running: where it stands, and the hashes that decide."""

    source: str
    shard: str
    row: int
    text_hash: str
    group_hash: str


def deduplicate_documents(
    *, expert: str, spec: DeduplicateSpec, shards: list[ShardRecord], keep: Path
) -> DocumentsRecord:
    """Write the keep-list of an expert and say what became of every record.

    Raises:
        DataError: fewer than two groups of documents, so that nothing could be held out.
    """
    dropped: Counter[str] = Counter()
    unique = drop_repeats([c for s in shards for c in candidates(s)], dropped)
    kept = cap(unique, spec.max_documents, dropped, seed=spec.seed)
    held_out = held_out_groups({c.group_hash for c in kept}, spec.eval_fraction)
    if len({c.group_hash for c in kept}) < 2:
        raise DataError(
            f"{expert}: {len(kept)} documents are too few to hold one out; add records, or check"
            f" what was rejected in results/{expert}/documents/"
        )
    _write(keep, kept, held_out)
    n_held_out = sum(c.group_hash in held_out for c in kept)
    rejected: Counter[str] = Counter()
    for shard in shards:
        rejected.update(shard.n_rejected_by_reason)
    return DocumentsRecord(
        expert=expert,
        keep_path=str(keep),
        sha256=sha256_file(keep),
        n_records=sum(s.n_records for s in shards),
        n_rejected=rejected.total(),
        n_documents=len(kept),
        n_train=len(kept) - n_held_out,
        n_held_out=n_held_out,
        n_dropped_by_reason=dict(sorted(dropped.items())),
        n_rejected_by_reason=dict(sorted(rejected.items())),
    )


def candidates(shard: ShardRecord) -> list[Candidate]:
    """Read the hashes of one shard's documents, in order."""
    with pa.memory_map(shard.path) as source:
        table = pa.ipc.open_stream(source).read_all().select(["text_hash", "group_hash"])
        hashes = zip(table["text_hash"].to_pylist(), table["group_hash"].to_pylist(), strict=True)
        return [Candidate(shard.source, shard.shard, row, *pair) for row, pair in enumerate(hashes)]


def drop_repeats(documents: list[Candidate], dropped: Counter[str]) -> list[Candidate]:
    """Keep the first of equal documents; count the others."""
    seen: set[str] = set()
    unique = []
    for document in documents:
        if document.text_hash in seen:
            dropped["duplicate"] += 1
        else:
            seen.add(document.text_hash)
            unique.append(document)
    return unique


def cap(
    documents: list[Candidate], n: int | None, dropped: Counter[str], *, seed: int
) -> list[Candidate]:
    """Keep ``n`` documents chosen by a seeded hash, in their old order."""
    if n is None or len(documents) <= n:
        return documents
    ranked = sorted(documents, key=lambda d: sha256_text(f"{seed}:{d.text_hash}"))
    chosen = {d.text_hash for d in ranked[:n]}
    dropped["over_max_documents"] = len(documents) - n
    return [d for d in documents if d.text_hash in chosen]


def held_out_groups(groups: set[str], fraction: float) -> set[str]:
    """Choose the groups whose salted hash, as a number in [0, 1), lies below ``fraction``.

    At least one group is held out and at least one is left: a run on two records still tells what
    it learned. The salt matters: a data set may itself have been cut by a plain hash of the very
    same key, and then its groups are not spread evenly any more.
    """
    place = {group: int(sha256_text(SALT + group)[:8], 16) / 16**8 for group in groups}
    chosen = {group for group in groups if place[group] < fraction}
    if not chosen and groups:
        chosen = {min(groups, key=lambda group: place[group])}
    if chosen == groups and len(groups) > 1:
        chosen.remove(max(groups, key=lambda group: place[group]))
    return chosen


def _write(path: Path, kept: list[Candidate], held_out: set[str]) -> None:
    table = pa.table(
        {
            "source": [c.source for c in kept],
            "shard": [c.shard for c in kept],
            "row": [c.row for c in kept],
            "held_out": [c.group_hash in held_out for c in kept],
        },
        schema=KEEP,
    )
    with replacing(path) as partial, pa.OSFile(str(partial), "wb") as sink:
        with pa.ipc.new_stream(sink, KEEP) as writer:
            writer.write_table(table)
