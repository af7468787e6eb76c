"""Pack an expert's token shards into rows of one length, and say what it cost."""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.tokens import packing as plan
from expertflow.tokens.arrow import ROWS_FILE, PackedRow, write_rows
from expertflow.tokens.records import (
    DecodedSample,
    LengthChoice,
    LengthHistogram,
    PackedSplit,
    PackingRecord,
    PackingSpec,
    TokenShardRecord,
)

LENGTHS = (128, 256, 512, 1024, 1536, 2048, 4096)
LONGEST_AUTO_LENGTH = 2048
N_BINS = 32
N_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """All documents of one split: ids and spans, in the order of the manifest."""

    ids: list[np.ndarray]
    spans: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        """Give each document's length in tokens."""
        return [len(ids) for ids in self.ids]


def pack_sequences(
    *, expert: str, spec: PackingSpec, shards: list[TokenShardRecord], output: Path
) -> PackingRecord:
    """Pack the training and held-out documents into ``output/train`` and ``output/held_out``.

    Raises:
        DataError: there is nothing to pack, or overflow drops every document.
    """
    dropped = check_dropped(shards, spec.max_rejected_fraction)
    train, held_out = read_shards(shards)
    lengths = train.lengths + held_out.lengths
    if not lengths or max(lengths) == 0:
        raise DataError(f"{expert}: no tokens to pack; check the documents and the tokenizer")
    length, reason = choose_length(spec, lengths)
    packed = {
        name: _pack_split(tokens, spec, length=length, output=output / name)
        for name, tokens in (("train", train), ("held_out", held_out))
    }
    for name, split in packed.items():
        if split.n_target_tokens == 0:
            raise DataError(
                f"{expert}: the {name} rows hold nothing to learn at {length} tokens; raise"
                f" max_seq_length, or set overflow to split (it is {spec.overflow})"
            )
    return PackingRecord(
        expert=expert,
        packing=spec.packing,
        overflow=spec.overflow,
        sequence_length_tokens=length,
        length_reason=reason,
        seed=spec.seed,
        engine=shards[0].engine,
        engine_version=shards[0].engine_version,
        tokenizer_sha256=shards[0].tokenizer_sha256,
        n_special_text_documents=sum(shard.n_special_text_documents for shard in shards),
        n_dropped_held_out=sum(shard.n_dropped_held_out for shard in shards),
        n_dropped_by_reason=dict(sorted(dropped.items())),
        samples=choose_samples(shards),
        train=packed["train"],
        held_out=packed["held_out"],
        histogram=histogram(lengths),
        choices=tuple(length_choice(lengths, choice) for choice in LENGTHS),
    )


def check_dropped(shards: list[TokenShardRecord], max_fraction: float) -> Counter[str]:
    """Count by reason the documents that the model cannot be given.

    Raises:
        DataError: they are more of one source than may be rejected.
    """
    total: Counter[str] = Counter()
    for source in dict.fromkeys(shard.source for shard in shards):
        own = [shard for shard in shards if shard.source == source]
        dropped: Counter[str] = Counter()
        for shard in own:
            dropped.update(shard.n_dropped_by_reason)
        n_documents = dropped.total() + sum(shard.n_different_documents for shard in own)
        if dropped.total() > max_fraction * n_documents:
            reasons = ", ".join(f"{reason} {n}" for reason, n in dropped.most_common())
            first = next(example for shard in own for example in shard.dropped_examples)
            raise DataError(
                f"source {source}: the model's chat template cannot write {dropped.total()} of"
                f" {n_documents} documents ({reasons}), first {first}; set data.chat_template to"
                " one that can, or mend the data"
            )
        total.update(dropped)
    return total


def choose_samples(shards: list[TokenShardRecord]) -> tuple[DecodedSample, ...]:
    """Show documents of as many sources as there are places."""
    by_source: dict[str, list[DecodedSample]] = {}
    for shard in shards:
        by_source.setdefault(shard.source, []).extend(shard.samples)
    in_turn = zip_longest(*by_source.values())
    return tuple(s for samples in in_turn for s in samples if s is not None)[:N_SAMPLES]


def read_shards(shards: list[TokenShardRecord]) -> tuple[SplitTokens, SplitTokens]:
    """Read all token shards; give the training and the held-out documents."""
    splits = (SplitTokens([], []), SplitTokens([], []))
    for shard in shards:
        with pa.memory_map(shard.path) as source:
            for batch in pa.ipc.open_stream(source):
                offsets = batch["ids"].offsets.to_numpy()
                values = batch["ids"].values.to_numpy()
                spans = batch["spans"].to_pylist()
                for i, held_out in enumerate(batch["held_out"].to_pylist()):
                    splits[held_out].ids.append(values[offsets[i] : offsets[i + 1]])
                    splits[held_out].spans.append(spans[i])
    return splits


def choose_length(spec: PackingSpec, lengths: list[int]) -> tuple[int, str]:
    """Take the length that the manifest sets, or the shortest that cuts no document."""
    if spec.sequence_length_tokens is not None:
        return spec.sequence_length_tokens, "set in the manifest"
    longest = max(lengths)
    for length in LENGTHS:
        if longest <= length <= LONGEST_AUTO_LENGTH:
            return length, f"the shortest choice that holds the longest document ({longest} tokens)"
    return (
        LONGEST_AUTO_LENGTH,
        f"the longest document has {longest} tokens; auto goes up to {LONGEST_AUTO_LENGTH}",
    )


def _pack_split(
    tokens: SplitTokens, spec: PackingSpec, *, length: int, output: Path
) -> PackedSplit:
    lengths = tokens.lengths
    pieces, rows, cuts = _plan(lengths, spec, length)
    ordered = [rows[i] for i in plan.order_rows(len(rows), seed=spec.seed)]
    built = [_build_row(row, pieces, tokens) for row in ordered]
    write_rows(output, iter(built), length=length)
    n_tokens = sum(piece.length for piece in pieces)
    return PackedSplit(
        path=str(output),
        sha256=sha256_file(output / ROWS_FILE),
        n_documents=len(lengths),
        n_documents_split=cuts.n_split,
        n_documents_truncated=cuts.n_truncated,
        n_documents_dropped=cuts.n_dropped,
        n_tokens_in=sum(lengths),
        n_tokens=n_tokens,
        n_tokens_dropped=cuts.n_tokens_dropped,
        n_supervised_tokens=sum(sum(r.spans[1::2]) - sum(r.spans[::2]) for r in built),
        n_target_tokens=sum(plan.count_targets(r.spans, r.seq_lengths) for r in built),
        n_padding_tokens=len(rows) * length - n_tokens,
        n_sequences=len(rows),
        n_sequences_lower_bound=-(-n_tokens // length),
        sum_len_sq=sum(piece.length**2 for piece in pieces),
    )


def _plan(
    lengths: list[int], spec: PackingSpec, length: int
) -> tuple[list[plan.Piece], list[plan.Row], plan.Pieces]:
    if spec.packing == "concat":
        pieces, rows = plan.concat_pieces(lengths, row_length=length)
        n_split = len({p.document for p in pieces if p.start > 0})
        return pieces, rows, plan.Pieces(pieces, n_split, 0, 0, 0)
    cuts = plan.cut(lengths, row_length=length, overflow=spec.overflow)
    sizes = [piece.length for piece in cuts.pieces]
    rows = plan.plan_rows(sizes, row_length=length, packing=spec.packing)
    return cuts.pieces, rows, cuts


def _build_row(row: plan.Row, pieces: list[plan.Piece], tokens: SplitTokens) -> PackedRow:
    ids, lengths, spans = [], [], []
    offset = 0
    for index in row:
        piece = pieces[index]
        ids.append(tokens.ids[piece.document][piece.start : piece.start + piece.length])
        spans += plan.clip_spans(tokens.spans[piece.document], piece, offset=offset)
        lengths.append(piece.length)
        offset += piece.length
    return PackedRow(np.concatenate(ids), lengths, spans)


def histogram(lengths: list[int]) -> LengthHistogram:
    """Bin document lengths and give their percentiles."""
    array = np.asarray(lengths)
    width = max(1, -(-int(array.max() + 1) // N_BINS))
    edges = np.arange(0, N_BINS + 1) * width
    counts, _ = np.histogram(array, bins=edges)
    p50, p90, p99 = (int(np.percentile(array, q, method="higher")) for q in (50, 90, 99))
    return LengthHistogram(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(array.max()),
    )


def length_choice(lengths: list[int], length: int) -> LengthChoice:
    """Say what rows of ``length`` would cut, and how full they would be."""
    cuts = plan.cut(lengths, row_length=length, overflow="split")
    sizes = [piece.length for piece in cuts.pieces]
    n_rows = len(plan.best_fit_decreasing(sizes, row_length=length))
    return LengthChoice(
        sequence_length_tokens=length,
        n_over_long_documents=sum(n > length for n in lengths),
        n_over_long_tokens=sum(max(0, n - length) for n in lengths),
        n_sequences=n_rows,
        fill_fraction=sum(lengths) / (n_rows * length),
    )
