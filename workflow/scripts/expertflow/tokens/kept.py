"""Put together, from token shards and the keep-list, the documents of each split.

What is held of a document is where its tokens lie, not the tokens: some thirty bytes each.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.records import Record
from expertflow.data.keep_list import KeptRows, joined_rows, keep_by_shard
from expertflow.tokens.arrow import IDS_DTYPE, from_arrow_lists, read_index
from expertflow.tokens.ragged import Ints, Ragged, offsets_of
from expertflow.tokens.records import DecodedSample, TokenShardRecord

N_SAMPLES = 3


class SplitDocuments(Record, frozen=True, kw_only=True):
    """Documents of one split in the order of the manifest, one that counts twice twice.

    ``offset`` is in tokens, within the ids of ``paths[shard]``.
    """

    paths: tuple[Path, ...]
    shard: NDArray[np.uint16]
    offset: Ints
    length: NDArray[np.int32]
    spans: Ragged

    @property
    def n_tokens(self) -> int:
        """Count the tokens."""
        return int(self.length.sum(dtype=np.int64))


class Kept(Record, frozen=True, kw_only=True):
    """Both splits, and what is to be said of the kept documents; each counts once."""

    train: SplitDocuments
    held_out: SplitDocuments
    n_special_text: int
    n_dropped_held_out: int
    n_dropped_by_reason: Counter[str]
    samples: tuple[DecodedSample, ...]


class _Part(NamedTuple):
    """Documents of one split and one shard."""

    shard: NDArray[np.uint16]
    offset: Ints
    length: NDArray[np.int32]
    spans: Ragged


def _split_documents(paths: tuple[Path, ...], parts: list[_Part]) -> SplitDocuments:
    return SplitDocuments(
        paths=paths,
        shard=_joined([part.shard for part in parts], np.uint16),
        offset=_joined([part.offset for part in parts], np.int64),
        length=_joined([part.length for part in parts], np.int32),
        spans=Ragged(
            _joined([part.spans.values for part in parts], np.int32),
            offsets_of(_joined([part.spans.lengths for part in parts], np.int64)),
        ),
    )


def read_kept(
    shards: Sequence[TokenShardRecord], keep: Path, *, max_rejected_fraction: float
) -> Kept:
    """Read the kept documents of all shards.

    Raises:
        DataError: the model cannot be given more of one source than may be rejected, or a file is
            not as long as its record says.
    """
    keep_rows = keep_by_shard(keep)
    splits: tuple[list[_Part], list[_Part]] = ([], [])
    by_source: dict[str, Counter[str]] = {}
    samples: dict[str, list[DecodedSample]] = {}
    n_kept: Counter[str] = Counter()
    paths = tuple(Path(shard.path) for shard in shards)
    n_special_text = n_dropped_held_out = 0
    for number, shard in enumerate(shards):
        rows = _rows_of(shard, keep_rows)
        if rows is None:
            continue
        index = read_index(Path(shard.index_path))
        lengths = index["n_tokens"].to_numpy()
        offsets = offsets_of(lengths)
        _check_size(paths[number], int(offsets[-1]) * IDS_DTYPE.itemsize)
        spans = from_arrow_lists(index["spans"])
        n_special_text += int(index["special_text"].to_numpy()[rows.rows].sum())
        n_kept[shard.source] += len(rows.rows)
        dropped = index["dropped"].take(rows.rows)
        reasons = Counter(dropped.drop_null().to_pylist())
        by_source.setdefault(shard.source, Counter()).update(reasons)
        there = dropped.is_null().to_numpy()
        n_dropped_held_out += int((rows.held_out & ~there).sum())
        for split, side in zip(splits, (~rows.held_out, rows.held_out), strict=True):
            taken = np.repeat(rows.rows[side & there], rows.n_copies[side & there])
            shard_of = np.full(len(taken), number, np.uint16)
            split.append(_Part(shard_of, offsets[taken], lengths[taken], spans.take(taken)))
        trained = rows.rows[~rows.held_out]
        own = [s.sample for s in shard.samples if (trained == s.row).any()]
        samples.setdefault(shard.source, []).extend(own)
    for source, reasons in by_source.items():
        own_shards = [shard for shard in shards if shard.source == source]
        _check_dropped(source, reasons, n_kept[source], own_shards, max_rejected_fraction)
    train, held_out = (_split_documents(paths, parts) for parts in splits)
    # Documents of as many sources as there are places.
    in_turn = zip_longest(*samples.values())
    return Kept(
        train=train,
        held_out=held_out,
        n_special_text=n_special_text,
        n_dropped_held_out=n_dropped_held_out,
        n_dropped_by_reason=sum(by_source.values(), Counter()),
        samples=tuple(s for each in in_turn for s in each if s is not None)[:N_SAMPLES],
    )


def _rows_of(shard: TokenShardRecord, keep: dict[tuple[str, str], KeptRows]) -> KeptRows | None:
    """Give the kept rows of a token shard, counted from its first document; null without any."""
    firsts = offsets_of(np.array(shard.n_documents_by_shard))
    parts = [
        keep[shard.source, name]._replace(rows=keep[shard.source, name].rows + first)
        for name, first in zip(shard.document_shards, firsts[:-1], strict=True)
        if (shard.source, name) in keep
    ]
    return joined_rows(shard.source, shard.shard, parts) if parts else None


def _check_size(path: Path, n_bytes: int) -> None:
    found = path.stat().st_size
    if found != n_bytes:
        raise DataError(f"{path}: {found} bytes, its index says {n_bytes}; delete it and run again")


def _check_dropped(
    source: str,
    reasons: Counter[str],
    n_documents: int,
    shards: list[TokenShardRecord],
    max_fraction: float,
) -> None:
    """Refuse a source of which the model cannot be given too much."""
    if reasons.total() <= max_fraction * n_documents:
        return
    said = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
    first = next(example for shard in shards for example in shard.dropped_examples)
    raise DataError(
        f"source {source}: the model's chat template cannot write {reasons.total()} of"
        f" {n_documents} documents ({said}), first {first}; set data.chat_template to one that"
        " can, or mend the data"
    )


def _joined(arrays: list[NDArray], dtype: type) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
