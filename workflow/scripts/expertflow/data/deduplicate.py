"""Drop duplicates across all shards, limit what is used, and split off held-out documents.

The first occurrence in manifest order stays, however many shards there are. Deduplication precedes
the split, so no held-out document equals (or, with near-duplicate detection, was found near) a
training document; a group's hash puts all of it on one side.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.documents import KEEP
from expertflow.data.near import NearIndex, find_buckets
from expertflow.data.records import (
    DocumentsRecord,
    DuplicateExample,
    RecordCounts,
    ShardRecord,
    SourceCounts,
)
from expertflow.data.selection import (
    KEPT,
    NO_CATEGORY,
    STATUS,
    Columns,
    mark_held_out,
    read_columns,
    read_document_ids,
    read_signatures,
    row_ranges,
    select_documents,
)
from expertflow.data.settings import DeduplicateSpec, NearSpec

N_EXAMPLES = 5
N_CATEGORIES = 50
KEEP_BATCH_ROWS = 1 << 16

# dropped document, the one kept instead, why, their similarity
Pair = tuple[int, int, str, float]


def deduplicate_documents(
    *, expert: str, spec: DeduplicateSpec, shards: list[ShardRecord], keep: Path
) -> DocumentsRecord:
    """Write the keep-list and count all records; DataError if too many rejects or too few left."""
    for source in dict.fromkeys(shard.source for shard in shards):
        check_source([s for s in shards if s.source == source], spec, expert=expert)
    keep.parent.mkdir(parents=True, exist_ok=True)
    columns = read_columns(shards)
    pairs = drop_equal(columns)
    # Frees 8 bytes per document: only equal texts needed all 128 bits.
    columns.text_rest = np.empty(0, np.uint64)
    if spec.near is not None:
        pairs += drop_near(columns, spec.near, shards, folder=keep.parent)
    edge, copies = select_documents(columns, spec, expert=expert)
    write_keep(keep, shards, columns, edge=edge, copies=copies)
    kept = columns.status == KEPT
    # The same rule as in the keep-list that was just written.
    train = kept & ~mark_held_out(columns.group, edge)
    n_sources = len(columns.sources)
    n_kept, n_train = (np.bincount(columns.source[s], minlength=n_sources) for s in (kept, train))
    by_name = sorted(zip(columns.sources, n_kept.tolist(), n_train.tolist(), strict=True))
    sources = tuple(_source_counts(shards, *found) for found in by_name)
    counts = RecordCounts.__struct_fields__
    by_status = zip(STATUS, np.bincount(columns.status, minlength=len(STATUS)), strict=True)
    dropped = {reason: int(n) for reason, n in by_status if reason != STATUS[KEPT] and n}
    names = read_document_ids(shards, {row for pair in pairs for row in pair[:2]})
    examples = (
        DuplicateExample(dropped=names[row], kept=names[first], reason=reason, similarity=share)
        for row, first, reason, share in pairs
    )
    return DocumentsRecord(
        expert=expert,
        sha256=sha256_file(keep),
        **{name: sum(getattr(source, name) for source in sources) for name in counts},
        n_train_copies=int(copies[train].sum()),
        n_dropped_by_reason=dict(sorted(dropped.items())),
        n_rejected_by_reason=_sum(shard.n_rejected_by_reason for shard in shards),
        n_filtered_by_reason=_sum(shard.n_filtered_by_reason for shard in shards),
        n_noted_by_reason=_sum(shard.n_noted_by_reason for shard in shards),
        n_kept_by_category=_largest_categories(columns, kept),
        duplicate_examples=tuple(examples),
        sources=sources,
    )


def check_source(shards: list[ShardRecord], spec: DeduplicateSpec, *, expert: str) -> None:
    name = shards[0].source
    rejected = _sum(shard.n_rejected_by_reason for shard in shards)
    n_records = sum(shard.n_records for shard in shards)
    examples = [example for shard in shards for example in shard.rejected_examples]
    first = f"; first: {examples[0]}" if examples else ""
    see = f"see results/{expert}/documents/{name}/*.rejected.jsonl"
    if rejected.total() > spec.max_rejected_fraction * n_records:
        raise DataError(
            f"source {name}: {rejected.total()} of {n_records} records rejected:"
            f" {_by_size(rejected)}{first}; {see}; correct the data or the template, or raise"
            f" data.max_rejected_fraction ({spec.max_rejected_fraction})"
        )
    if not n_records:
        raise DataError(
            f"source {name}: no record was selected; correct its where, which must equal the"
            " fields' values and types, or its path"
        )
    if not any(shard.n_documents for shard in shards):
        lost = rejected + _sum(shard.n_filtered_by_reason for shard in shards)
        why = f": {_by_size(lost)}{first}; {see}" if lost else ""
        raise DataError(
            f"source {name}: none of its {n_records} records is left{why}; correct the data, or"
            " the source's path, where, checks or template"
        )


def drop_equal(columns: Columns) -> list[Pair]:
    rows, first = find_buckets(columns.text, columns.text_rest)
    later = rows != first
    rows, first = rows[later], first[later]
    columns.drop(rows, "duplicate")
    few = np.argsort(rows)[:N_EXAMPLES]
    pairs = zip(rows[few].tolist(), first[few].tolist(), strict=True)
    return [(row, kept, "duplicate", 1.0) for row, kept in pairs]


def drop_near(
    columns: Columns, spec: NearSpec, shards: list[ShardRecord], *, folder: Path
) -> list[Pair]:
    rows = np.flatnonzero(columns.status == KEPT)
    with closing(NearIndex(spec, n_documents=len(rows), folder=folder)) as index:
        for signatures in read_signatures(shards, columns):
            index.add(signatures)
        leaders = index.find_leaders()
        near = np.flatnonzero(leaders >= 0)
        # Examples whose leader is kept, not itself near an earlier one.
        shown = near[leaders[leaders[near]] < 0][:N_EXAMPLES]
        n_equal = index.count_matches(leaders[shown].astype(np.int64), shown)
    columns.drop(rows[near], "near_duplicate")
    found = (rows[shown], rows[leaders[shown]], n_equal / spec.n_permutations)
    triples = zip(*(column.tolist() for column in found), strict=True)
    return [(row, kept, "near_duplicate", value) for row, kept, value in triples]


def write_keep(
    path: Path, shards: list[ShardRecord], columns: Columns, *, edge: int, copies: NDArray[np.int32]
) -> None:
    with (
        replacing(path) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_stream(sink, KEEP) as writer,
    ):
        for shard, part in row_ranges(shards):
            rows = np.flatnonzero(columns.status[part] == KEPT)
            if len(rows):
                kept = {
                    "source": pa.repeat(shard.source, len(rows)),
                    "shard": pa.repeat(shard.shard, len(rows)),
                    "row": pa.array(rows.astype(np.int32)),
                    "held_out": pa.array(mark_held_out(columns.group[part][rows], edge)),
                    "n_copies": pa.array(copies[part][rows]),
                }
                writer.write_table(pa.table(kept, schema=KEEP), KEEP_BATCH_ROWS)


def _source_counts(shards: list[ShardRecord], name: str, n_kept: int, n_train: int) -> SourceCounts:
    own = [shard for shard in shards if shard.source == name]
    return SourceCounts(
        source=name,
        n_records=sum(shard.n_records for shard in own),
        n_rejected=_sum(shard.n_rejected_by_reason for shard in own).total(),
        n_filtered=_sum(shard.n_filtered_by_reason for shard in own).total(),
        n_dropped=sum(shard.n_documents for shard in own) - n_kept,
        n_train=n_train,
        n_held_out=n_kept - n_train,
    )


def _largest_categories(columns: Columns, kept: NDArray[np.bool_]) -> dict[str, int]:
    named = columns.category[kept & (columns.category != NO_CATEGORY)]
    counts = np.bincount(named, minlength=len(columns.categories)).tolist()
    sizes = [(name, n) for name, n in zip(columns.categories, counts, strict=True) if n]
    return dict(sorted(sorted(sizes, key=lambda item: (-item[1], item[0]))[:N_CATEGORIES]))


def _sum(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total = sum(map(Counter, counts), Counter[str]())
    return Counter(dict(sorted(total.items())))


def _by_size(counts: Counter[str]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {n}" for reason, n in ordered)
