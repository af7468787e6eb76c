"""The documents of each split: their token locations, and their tokens gathered into rows.

Only locations are in memory. Rows are gathered a few at a time, reading documents in file order,
each directly into its place.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.records import REPAIR, Record
from expertflow.data.documents import KeptRows, join_rows, read_keep
from expertflow.tokens.arrow import IDS_DTYPE, PAD_ID, PackedRows, from_arrow_lists, read_index
from expertflow.tokens.packing import Pieces, clip_spans
from expertflow.tokens.ragged import Ints, Ragged, concat_ragged, offsets_of
from expertflow.tokens.records import DecodedSample, TokenShardRecord

N_SAMPLES = 3
BATCH_BYTES = 32 << 20
# Where documents of equal length are compared first, in tokens from their end.
# From the end, because many documents begin alike, e.g. with the same system prompt.
PROBES = (8, 16, 32, 64)


class SplitDocuments(Record, frozen=True, kw_only=True):
    """Documents of one split in manifest order, repeats included.

    ``offset`` is in tokens, within the ids of ``paths[shard]``. ``numbers`` are the places of
    held-out documents among all of them, dropped ones included.
    """

    paths: tuple[Path, ...]
    shard: NDArray[np.uint16]
    offset: Ints
    length: NDArray[np.int32]
    spans: Ragged
    numbers: Ints | None = None


class Splits(Record, frozen=True, kw_only=True):
    train: SplitDocuments
    held_out: SplitDocuments
    n_special_text: int
    # By source, and whether they are held out.
    n_dropped: Counter[tuple[str, bool]]
    n_dropped_by_reason: Counter[str]
    samples: tuple[DecodedSample, ...]


def load_splits(
    shards: Sequence[TokenShardRecord], keep: Path, *, max_rejected_fraction: float
) -> Splits:
    """Read the kept documents; DataError for too many rejects or a wrong file size."""
    keep_rows = read_keep(keep)
    none = np.empty(0, np.int64)
    # Per document: shard, offset, length and side of the split.
    columns = [(none.astype(np.uint16), none, none.astype(np.int32), none.astype(np.bool_))]
    spans, has_tokens = [Ragged.from_lists()], [none.astype(np.bool_)]
    reasons: dict[str, Counter[str]] = {}
    samples: dict[str, list[DecodedSample]] = {}
    n_kept, n_dropped, n_special_text = Counter[str](), Counter[tuple[str, bool]](), 0
    for number, shard in enumerate(shards):
        rows = _rows_of(shard, keep_rows)
        if rows is None:
            continue
        index = read_index(Path(shard.index_path))
        lengths = index["n_tokens"].to_numpy()
        offsets = offsets_of(lengths)
        _check_size(shard.path, int(offsets[-1]) * IDS_DTYPE.itemsize)
        n_special_text += int(index["special_text"].to_numpy()[rows.rows].sum())
        n_kept[shard.source] += len(rows.rows)
        dropped = index["dropped"].take(rows.rows)
        reasons.setdefault(shard.source, Counter()).update(dropped.drop_null().to_pylist())
        there = dropped.is_null().to_numpy()
        n_dropped.update((shard.source, side) for side in rows.held_out[~there].tolist())
        taken = np.repeat(rows.rows[there], rows.n_copies[there])
        held_out = np.repeat(rows.held_out[there], rows.n_copies[there])
        has_tokens.append(there[rows.held_out])
        shard_of = np.full(len(taken), number, np.uint16)
        columns.append((shard_of, offsets[taken], lengths[taken], held_out))
        spans.append(from_arrow_lists(index["spans"]).take(taken))
        own = [s for row, s in shard.samples if row in rows.rows[~rows.held_out]]
        samples.setdefault(shard.source, []).extend(own)
    for source, counts in reasons.items():
        own_shards = [shard for shard in shards if shard.source == source]
        _check_dropped(source, counts, n_kept[source], own_shards, max_rejected_fraction)
    shard_of, offset, length, is_held_out = map(np.concatenate, zip(*columns, strict=True))
    all_spans = concat_ragged(spans)
    train, evaluated = (
        SplitDocuments(
            paths=tuple(Path(shard.path) for shard in shards),
            shard=shard_of[side],
            offset=offset[side],
            length=length[side],
            spans=all_spans.take(np.flatnonzero(side)),
        )
        for side in (~is_held_out, is_held_out)
    )
    # Documents from as many sources as possible.
    in_turn = zip_longest(*samples.values())
    return Splits(
        train=train,
        held_out=replace(evaluated, numbers=np.flatnonzero(np.concatenate(has_tokens))),
        n_special_text=n_special_text,
        n_dropped=n_dropped,
        n_dropped_by_reason=sum(reasons.values(), Counter()),
        samples=tuple(s for each in in_turn for s in each if s is not None)[:N_SAMPLES],
    )


def check_leakage(expert: str, splits: Splits, shards: Sequence[TokenShardRecord]) -> None:
    """Raise DataError if a held-out document has exactly the tokens of a training document.

    Only documents that match one on the other side in length and at all probes are read.
    """
    # An empty file cannot be mapped; slicing a memmap itself is slow.
    none = np.empty(0, IDS_DTYPE)
    ids = [np.asarray(np.memmap(s.path, IDS_DTYPE, "r")) if s.n_tokens else none for s in shards]
    train, held_out = splits.train, splits.held_out
    trained, asked = np.flatnonzero(train.length), np.flatnonzero(held_out.length)
    for n_back in PROBES:
        keys, others = _probe(train, trained, ids, n_back), _probe(held_out, asked, ids, n_back)
        # Keys are small, so a table of 2^20 flags finds them faster than sorting does.
        trained = trained[np.isin(keys, others, kind="table")]
        asked = asked[np.isin(others, keys, kind="table")]

    def digests(side: SplitDocuments, rows: Ints) -> Iterator[tuple[bytes, str]]:
        places = (column[rows].tolist() for column in (side.shard, side.offset, side.length))
        for shard, start, length in zip(*places, strict=True):
            yield blake2b(ids[shard][start : start + length]).digest(), shards[shard].source

    own = list(digests(held_out, asked))
    wanted = {digest for digest, _ in own}
    seen = {digest: source for digest, source in digests(train, trained) if digest in wanted}
    leaked = [(source, seen[digest]) for digest, source in own if digest in seen]
    if leaked:
        raise DataError(
            f"{expert}: {len(leaked)} held-out documents are in the training data, token for token,"
            f" the first from source {leaked[0][0]} as one from source {leaked[0][1]}; correct the"
            " sources' duplicate_fields, so that one of the two is dropped, or group, so that both"
            " are on one side"
        )


def _probe(
    documents: SplitDocuments, rows: Ints, ids: Sequence[NDArray[np.int32]], n_back: int
) -> NDArray[np.int32]:
    """Return keys below 2^20, equal for equal lengths and tokens ``n_back`` from the end."""
    # Documents are in the order of their shards, which the slices below rely on.
    length, shard = documents.length[rows], documents.shard[rows]
    at = documents.offset[rows] + np.maximum(length - n_back, 0)
    edges = np.searchsorted(shard, range(len(ids) + 1)).tolist()
    parts = [own[at[i:j]] for own, (i, j) in zip(ids, pairwise(edges), strict=True) if i < j]
    tokens = np.concatenate([np.empty(0, np.int32), *parts])
    # May wrap around in int32. Documents with equal keys are compared in full, so any key will do.
    return (tokens * 4099 + length) & 0xFFFFF


def _check_size(path: str, n_bytes: int) -> None:
    found = Path(path).stat().st_size
    if found != n_bytes:
        raise DataError(f"{path}: {found} bytes, but its index lists {n_bytes}; {REPAIR}")


def _rows_of(shard: TokenShardRecord, keep: dict[tuple[str, str], KeptRows]) -> KeptRows | None:
    firsts = offsets_of(np.array(shard.n_documents_by_shard))
    parts = [
        keep[shard.source, name]._replace(rows=keep[shard.source, name].rows + first)
        for name, first in zip(shard.document_shards, firsts[:-1], strict=True)
        if (shard.source, name) in keep
    ]
    return join_rows(parts) if parts else None


def _check_dropped(
    source: str,
    reasons: Counter[str],
    n_documents: int,
    shards: list[TokenShardRecord],
    max_fraction: float,
) -> None:
    if reasons.total() <= max_fraction * n_documents:
        return
    counts = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
    first = next(example for shard in shards for example in shard.dropped_examples)
    raise DataError(
        f"source {source}: {reasons.total()} of {n_documents} documents are not tokenized"
        f" ({counts}), first {first}; correct the data, set data.chat_template or"
        f" data.text_special_tokens, or raise data.max_rejected_fraction ({max_fraction})"
    )


def row_batches(
    documents: SplitDocuments,
    pieces: Pieces,
    rows: Ragged,
    *,
    length: int,
    done: Callable[[int], None],
) -> Iterator[PackedRows]:
    """Yield padded rows of pieces; each batch is valid until the next is requested."""
    per_batch = max(1, BATCH_BYTES // (length * IDS_DTYPE.itemsize))
    ids = np.empty((min(per_batch, len(rows)), length), IDS_DTYPE)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")).fileno() for path in documents.paths]
        for first in range(0, len(rows), per_batch):
            part = rows.take(np.arange(first, min(first + per_batch, len(rows))))
            numbers = part.values
            lengths = Ragged(pieces.length[numbers], part.offsets)
            n_tokens = lengths.sum_lists()
            # Position of each piece in its row, and of the row in the batch.
            before = offsets_of(lengths.values)[:-1]
            at = before - np.repeat(offsets_of(n_tokens)[:-1], lengths.lengths)
            place = at + np.repeat(np.arange(len(part)) * length, lengths.lengths)
            taken = ids[: len(part)]
            for row in np.flatnonzero(n_tokens < length).tolist():
                taken[row, n_tokens[row] :] = PAD_ID
            document = pieces.document[numbers]
            offset = documents.offset[document] + pieces.start[numbers]
            _read(files, documents.shard[document], offset, lengths.values, place, out=taken)
            spans = clip_spans(
                documents.spans.take(document),
                pieces.start[numbers].astype(np.int64),
                lengths.values.astype(np.int64),
                at,
            )
            # From one list per piece to one per row.
            spans = Ragged(spans.values, spans.offsets[part.offsets])
            yield PackedRows((taken,), lengths, spans)
            done(len(part))


def _read(
    files: list[int],
    shard: NDArray[np.uint16],
    offset: Ints,
    length: NDArray[np.int32],
    place: Ints,
    *,
    out: NDArray[np.int32],
) -> None:
    size = IDS_DTYPE.itemsize
    # By file, then by place in it: lexsort takes its last key first.
    order = np.lexsort((offset, shard))
    memory = out.reshape(-1).data.cast("B")
    starts, ends = place[order] * size, (place + length)[order] * size
    columns = (shard[order], offset[order] * size, starts, ends)
    for number, at, start, end in zip(*(c.tolist() for c in columns), strict=True):
        # Straight into the row's place, without an intermediate buffer.
        if os.preadv(files[number], (memory[start:end],), at) != end - start:
            raise DataError(f"a token file ends early; {REPAIR}")
