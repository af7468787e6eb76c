"""Read documents as flat arrays, and choose how many are used: caps, weights, the split.

The arrays take 23 to 31 bytes per document.

Every choice uses a rank: the document's hash, mixed with the seed and the rule, so that passing one
rule does not favor passing the next. A rank depends on no other document: as data grows, a choice
changes only where other documents reach a limit. The split uses the group's position, so documents
keep their side as data is added. Weights do not affect held-out documents, so that their loss is
comparable across mixtures.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.data.documents import iter_batches
from expertflow.data.near import Rows
from expertflow.data.records import ShardRecord
from expertflow.data.settings import DeduplicateSpec
from expertflow.data.shingles import Hashes, mix_bits, random_numbers

# A document's outcome; ``Columns.status`` is an index into this tuple.
STATUS = (
    *("kept", "duplicate", "near_duplicate", "over_source_cap", "over_category_cap"),
    *("below_weight", "over_max_documents"),
)
KEPT = 0
NO_CATEGORY = -1
# Each rule with its manifest setting.
LIMITS = {
    "over_source_cap": "max_documents of the sources",
    "over_category_cap": "data.max_per_category",
    "below_weight": "weight of the sources",
    "over_max_documents": "data.max_documents",
}
RULES = tuple(LIMITS)
N_PLACES = 1 << 64


class Columns(Struct, kw_only=True):
    """One entry per document, in manifest order.

    ``text``, ``text_rest`` are halves of ``text_hash``; ``source``, ``category`` index the names.
    """

    text: Hashes
    text_rest: Hashes
    group: Hashes
    category: NDArray[np.int32]
    source: NDArray[np.uint16]
    status: NDArray[np.uint8]
    sources: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)

    def drop(self, rows: Rows, reason: str) -> None:
        self.status[rows] = STATUS.index(reason)


def read_columns(shards: list[ShardRecord]) -> Columns:
    """Read the shards' columns in manifest order; DataError if a shard's count differs."""
    n = sum(shard.n_documents for shard in shards)
    columns = Columns(
        text=np.empty(n, np.uint64),
        text_rest=np.empty(n, np.uint64),
        group=np.empty(n, np.uint64),
        category=np.empty(n, np.int32),
        source=np.empty(n, np.uint16),
        status=np.zeros(n, np.uint8),
        sources=list(dict.fromkeys(shard.source for shard in shards)),
    )
    places: dict[str, int] = {}
    for shard, here, batch in _iter_rows(shards, "text_hash", "group_hash", "category"):
        columns.source[here] = columns.sources.index(shard.source)
        hashes = _fixed(batch.column("text_hash"), np.dtype("<u8"))
        # 16 bytes as two halves: numpy has no 128-bit integers.
        columns.text[here], columns.text_rest[here] = hashes.T
        columns.group[here] = batch.column("group_hash").to_numpy()
        # Each name once per batch, not once per document.
        names = batch.column("category").dictionary_encode(null_encoding="encode")
        numbers = [
            NO_CATEGORY if name is None else places.setdefault(name, len(places))
            for name in names.dictionary.to_pylist()
        ]
        columns.category[here] = np.array(numbers, np.int32)[names.indices.to_numpy()]
    columns.categories = list(places)
    return columns


def read_signatures(shards: list[ShardRecord], columns: Columns) -> Iterator[NDArray[np.uint32]]:
    for _, here, batch in _iter_rows(shards, "signature"):
        yield _fixed(batch.column("signature"), np.dtype("<u4"))[columns.status[here] == KEPT]


def read_document_ids(shards: list[ShardRecord], rows: set[int]) -> dict[int, str]:
    names: dict[int, str] = {}
    for shard, part in row_ranges(shards):
        if own := rows.intersection(range(part.start, part.stop)):
            ids = pa.Table.from_batches(iter_batches(shard.path, ("document_id",)))[0]
            names |= {row: ids[row - part.start].as_py() for row in own}
    return names


def row_ranges(shards: list[ShardRecord]) -> list[tuple[ShardRecord, slice]]:
    ends = np.cumsum([0, *(shard.n_documents for shard in shards)]).tolist()
    return [(shard, slice(*pair)) for shard, pair in zip(shards, pairwise(ends), strict=True)]


def _iter_rows(
    shards: list[ShardRecord], *names: str
) -> Iterator[tuple[ShardRecord, slice, pa.RecordBatch]]:
    for shard, part in row_ranges(shards):
        row = part.start
        for batch in iter_batches(shard.path, names):
            here = slice(row, row + batch.num_rows)
            row = here.stop
            if row > part.stop:
                break
            yield shard, here, batch
        if row != part.stop:
            raise DataError(
                f"{shard.path}: does not have the {shard.n_documents} documents that its record"
                " states; delete it to prepare it again"
            )


def _fixed(column: pa.Array, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    n_values = column.type.byte_width // dtype.itemsize
    # [n, values], a view without a copy; the offset of a sliced column is in rows.
    values = np.frombuffer(column.buffers()[1], dtype).reshape(-1, n_values)
    return values[column.offset : column.offset + len(column)]


def mark_lowest(text: Hashes, rows: Rows, n: int, *, seed: int, rule: str) -> NDArray[np.bool_]:
    """Mark the ``n`` lowest-ranked rows, ties by order."""
    if n >= len(rows):
        return np.ones(len(rows), bool)
    # A different key per seed and rule: passing one must not favor passing the next.
    key = random_numbers(1, seed=seed * len(RULES) + RULES.index(rule))
    ranks = mix_bits(text[rows] ^ key)
    # Ranks below the n-th are chosen; of those equal to it, the first ones.
    edge = np.partition(ranks, n)[n]
    chosen: NDArray[np.bool_] = ranks < edge
    chosen[np.flatnonzero(ranks == edge)[: n - int(chosen.sum())]] = True
    return chosen


def cap_categories(columns: Columns, spec: DeduplicateSpec) -> None:
    if unknown := sorted(spec.category_caps.keys() - columns.categories):
        raise DataError(
            f"data.max_per_category: no document has category {unknown[0]!r}; correct or remove it"
            f" (there are {', '.join(map(repr, columns.categories[:9])) or 'none'})"
        )
    named = (columns.status == KEPT) & (columns.category != NO_CATEGORY)
    counts = np.bincount(columns.category[named], minlength=len(columns.categories))
    every = math.inf if spec.max_per_category is None else spec.max_per_category
    limits = np.array([spec.category_caps.get(name, every) for name in columns.categories])
    over = counts > limits
    rows = np.flatnonzero(named & np.append(over, False)[columns.category])
    # By category, in manifest order within each.
    rows = rows[np.argsort(columns.category[rows], kind="stable")]
    by_category = np.split(rows, np.cumsum(counts[over])[:-1])
    for limit, own in zip(limits[over], by_category, strict=False):
        _keep(columns, own, int(limit), seed=spec.seed, rule="over_category_cap")


def apply_weights(
    columns: Columns, weights: dict[str, float], *, edge: int, seed: int
) -> NDArray[np.int32]:
    """Thin or repeat each source's training documents by its weight; return the copies.

    0.3 keeps that share, at least one document; 2.5 keeps each twice, and half of them once more.
    """
    copies = np.ones(len(columns.text), np.int32)
    for place, name in enumerate(columns.sources):
        weight = weights.get(name, 1.0)
        if weight == 1.0:
            continue
        of_source = (columns.status == KEPT) & (columns.source == place)
        rows = np.flatnonzero(of_source & ~mark_held_out(columns.group, edge))
        whole = math.floor(weight)
        # Rounded half up; round() rounds 0.5 to 0 and 1.5 to 2.
        n = math.floor((weight - whole) * len(rows) + 0.5)
        if whole == 0:
            _keep(columns, rows, max(1, n), seed=seed, rule="below_weight")
        else:
            copies[rows] = whole
            copies[rows[mark_lowest(columns.text, rows, n, seed=seed, rule="below_weight")]] += 1
    return copies


def split_edge(columns: Columns, fraction: float, *, expert: str) -> int:
    """Return the position below which a group of kept documents is held out.

    It is ``fraction`` of all positions, adjusted to leave a group on each side, so that two records
    suffice. DataError for fewer than two groups, naming a limit that caused it.
    """
    kept = columns.status == KEPT
    least = int(np.min(columns.group, where=kept, initial=np.uint64(N_PLACES - 1)))
    most = int(np.max(columns.group, where=kept, initial=np.uint64(0)))
    if least < most:
        return min(max(math.ceil(fraction * N_PLACES), least + 1), most)
    n = int(kept.sum())
    limited = [rule for rule in RULES if STATUS.index(rule) in columns.status]
    before = kept | np.isin(columns.status, [STATUS.index(rule) for rule in limited])
    # The limits are the cause if there were enough groups before.
    if len(np.unique(columns.group[before])) > 1:
        raise DataError(
            f"{expert}: only {n} documents are left after caps; raise"
            f" {' and '.join(LIMITS[rule] for rule in limited)}, so that one can be held out"
        )
    raise DataError(
        f"{expert}: too few documents to hold one out: {n} left"
        + (", all of one group" if n > 1 else "")
        + "; add records, check for repeats, or check what was rejected in"
        f" results/{expert}/documents/"
    )


def mark_held_out(group: Hashes, edge: int) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = group < np.uint64(edge)
    return result


def select_documents(
    columns: Columns, spec: DeduplicateSpec, *, expert: str
) -> tuple[int, NDArray[np.int32]]:
    for place, name in enumerate(columns.sources):
        if (n := spec.max_per_source.get(name)) is not None:
            rows = np.flatnonzero((columns.status == KEPT) & (columns.source == place))
            _keep(columns, rows, n, seed=spec.seed, rule="over_source_cap")
    cap_categories(columns, spec)
    edge = split_edge(columns, spec.eval_fraction, expert=expert)
    copies = apply_weights(columns, spec.weights, edge=edge, seed=spec.seed)
    if (n := spec.max_documents) is not None:
        rows = np.flatnonzero(columns.status == KEPT)
        _keep(columns, rows, n, seed=spec.seed, rule="over_max_documents")
    # The last limit may have emptied a side; then one group moves over.
    edge = split_edge(columns, spec.eval_fraction, expert=expert)
    # A held-out document is evaluated once, whatever the weight of its source.
    copies[mark_held_out(columns.group, edge)] = 1
    return edge, copies


def _keep(columns: Columns, rows: Rows, n: int, *, seed: int, rule: str) -> None:
    columns.drop(rows[~mark_lowest(columns.text, rows, n, seed=seed, rule=rule)], rule)
