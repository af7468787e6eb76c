"""Pack an expert's token shards into rows of one length, and report the cost."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertflow.core.disk import check_space
from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.core.format import percent
from expertflow.core.progress import ProgressCounter, show_activity
from expertflow.tokens import load_splits, packing, records
from expertflow.tokens.arrow import DOCUMENTS_FILE, IDS_DTYPE, ROWS_FILE, PackedRows, write_rows
from expertflow.tokens.engine import CHOSEN
from expertflow.tokens.ragged import Ragged

LENGTHS = (128, 256, 512, 1024, 1536, 2048, 4096)
LONGEST_AUTO_LENGTH = 2048
SUGGESTED_CUT_FRACTION = 0.01
N_BINS = 32


def pack_sequences(
    *,
    expert: str,
    spec: records.PackingSpec,
    shards: list[records.TokenShardRecord],
    keep: Path,
    directory: Path,
) -> records.PackingRecord:
    """Write the rows of both splits below ``directory``; DataError if nothing is left to pack."""
    by_engine = {shard.engine: shard for shard in shards}
    if len(by_engine) > 1:
        # The assignment of texts to engines would depend on the number of shards.
        odd = by_engine["tokenizers"]
        raise DataError(
            f"{expert}: {odd.source}/{odd.shard} was tokenized by tokenizers ({odd.engine_reason})"
            " and other shards by fastokens; set data.token_engine to tokenizers"
        )
    splits = load_splits.load_splits(shards, keep, max_rejected_fraction=spec.max_rejected_fraction)
    lengths = np.concatenate((splits.train.length, splits.held_out.length))
    if not lengths.any():
        raise DataError(f"{expert}: no tokens to pack; check the documents and the tokenizer")
    # Deduplication compares fields of records; documents that differ there may have equal tokens.
    load_splits.check_leakage(expert, splits, shards)
    length, reason = choose_length(spec, int(lengths.max()))
    packed: dict[str, Any] = {
        name: _pack_split(documents, spec, length=length, output=directory / name)
        for name, documents in (("train", splits.train), ("held_out", splits.held_out))
    }
    for name, split in packed.items():
        if split.n_target_tokens == 0:
            raise DataError(
                f"{expert}: the {name} rows contain nothing to learn at {length} tokens; raise"
                f" max_seq_length, or set overflow to split (it is {spec.overflow})"
            )
    choices = tuple(_length_choice(lengths, choice) for choice in LENGTHS)
    engines = Counter(f"{shard.engine} {shard.engine_version}" for shard in shards)
    fallbacks = {
        shard.engine_reason
        for shard in shards
        if shard.engine == "tokenizers" and shard.engine_reason != CHOSEN
    }
    return records.PackingRecord(
        expert=expert,
        packing=spec.packing,
        overflow="not used" if spec.packing == "concat" else spec.overflow,
        sequence_length_tokens=length,
        length_reason=reason,
        seed=spec.seed,
        engines=dict(sorted(engines.items())),
        engine_fallbacks=tuple(sorted(fallbacks)),
        tokenizer_sha256=shards[0].tokenizer_sha256,
        n_special_text_documents=splits.n_special_text,
        **_count_dropped(splits, spec, length, shards),
        samples=splits.samples,
        **packed,
        histogram=_histogram(lengths),
        choices=choices,
        suggestion=_suggest(choices, n_documents=len(lengths), n_tokens=int(lengths.sum())),
    )


def choose_length(spec: records.PackingSpec, longest: int) -> tuple[int, str]:
    if spec.sequence_length_tokens is not None:
        return spec.sequence_length_tokens, "set by max_seq_length"
    for length in LENGTHS:
        if longest <= length <= LONGEST_AUTO_LENGTH:
            return length, f"the shortest choice that fits the longest document ({longest} tokens)"
    return (
        LONGEST_AUTO_LENGTH,
        f"the longest document has {longest} tokens; auto goes up to {LONGEST_AUTO_LENGTH}",
    )


def _count_dropped(
    splits: load_splits.Splits,
    spec: records.PackingSpec,
    length: int,
    shards: list[records.TokenShardRecord],
) -> dict[str, Any]:
    """Count the documents that are not in the rows, without repeats."""
    is_dropping = spec.overflow == "drop" and spec.packing != "concat"
    too_long: Counter[tuple[str, bool]] = Counter()
    for is_held_out, documents in enumerate((splits.train, splits.held_out)):
        rows = (documents.length > length) & is_dropping
        # Repeats of a document have the same place in the same shard.
        places = set(zip(documents.shard[rows].tolist(), documents.offset[rows], strict=True))
        too_long.update((shards[number].source, bool(is_held_out)) for number, _ in places)
    lost = splits.n_dropped + too_long
    reasons = splits.n_dropped_by_reason + Counter({records.TOO_LONG: too_long.total()})
    return {
        "n_dropped_held_out": sum(n for (_, is_held_out), n in lost.items() if is_held_out),
        "n_dropped_by_reason": dict(sorted(reasons.items())),
        "n_dropped_by_source": {s: (lost[s, False], lost[s, True]) for s, _ in sorted(lost)},
    }


def _pack_split(
    documents: load_splits.SplitDocuments, spec: records.PackingSpec, *, length: int, output: Path
) -> records.PackedSplit:
    pieces, rows = plan_rows(documents, spec, length, is_trained=documents.numbers is None)
    # Packing emits rows longest first; shuffle to avoid a curriculum.
    rows = rows.take(np.random.default_rng(spec.seed).permutation(len(rows)))
    check_space([(output, len(rows) * length * IDS_DTYPE.itemsize, f"{len(rows)} rows")])
    progress = ProgressCounter(f"{output}", total=len(rows), unit="rows packed")
    n_targets = 0

    # Counted while writing, since only one batch is in memory.
    def counted() -> Iterator[PackedRows]:
        nonlocal n_targets
        for batch in load_splits.row_batches(
            documents, pieces, rows, length=length, done=progress.add
        ):
            n_targets += int(packing.count_targets(batch.seq_lengths, batch.spans).sum())
            yield batch

    with show_activity(progress.describe):
        write_rows(output, counted(), length=length)
    if documents.numbers is not None:
        np.save(output / DOCUMENTS_FILE, documents.numbers[pieces.document[rows.values]])
    n_tokens = int(pieces.length.sum())
    return records.PackedSplit(
        path=str(output),
        sha256=sha256_file(output / ROWS_FILE),
        n_documents=len(documents.length),
        n_tokens_in=int(documents.length.sum()),
        n_tokens=n_tokens,
        n_tokens_dropped=pieces.n_tokens_dropped,
        n_target_tokens=n_targets,
        n_padding_tokens=len(rows) * length - n_tokens,
        n_sequences=len(rows),
        # In int32 one document of 46,341 tokens would overflow.
        sum_len_sq=int((pieces.length.astype(np.int64) ** 2).sum()),
    )


def plan_rows(
    documents: load_splits.SplitDocuments,
    spec: records.PackingSpec,
    length: int,
    *,
    is_trained: bool,
) -> tuple[packing.Pieces, Ragged]:
    lengths = documents.length
    if spec.packing == "concat":
        pieces, rows = packing.concat_pieces(lengths, row_length=length)
    else:
        pieces = packing.cut_documents(lengths, row_length=length, overflow=spec.overflow)
        n = len(pieces.length)
        rows = Ragged(np.arange(n, dtype=np.int32), np.arange(n + 1))
    if is_trained:
        pieces, rows = packing.drop_untrained(pieces, rows, documents.spans)
    if spec.packing == "bfd":
        rows = packing.best_fit_decreasing(pieces.length, row_length=length)
    return pieces, rows


def _histogram(lengths: NDArray[np.int32]) -> records.LengthHistogram:
    longest = int(lengths.max())
    # The first edges round to equal numbers. The last is above the longest document, because each
    # count excludes its upper edge.
    edges = np.unique(np.geomspace(1, longest + 1, N_BINS).round().astype(int))
    counts, _ = np.histogram(lengths, bins=edges)
    # "higher" returns a length that occurs; other methods interpolate.
    percentiles = {f"p{q}": int(np.percentile(lengths, q, method="higher")) for q in (50, 90, 99)}
    return records.LengthHistogram(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        **percentiles,
        max=longest,
    )


def _length_choice(lengths: NDArray[np.int32], length: int) -> records.LengthChoice:
    n_rows = packing.count_rows(lengths, row_length=length)
    over = lengths[lengths > length].astype(np.int64) - length
    return records.LengthChoice(
        sequence_length_tokens=length,
        n_over_long_documents=len(over),
        n_over_long_tokens=int(over.sum()),
        n_sequences=n_rows,
        fill_fraction=int(lengths.sum()) / (n_rows * length),
    )


def _suggest(
    choices: tuple[records.LengthChoice, ...], *, n_documents: int, n_tokens: int
) -> records.LengthSuggestion:
    chosen = next(
        (
            choice
            for choice in choices
            if choice.n_over_long_documents <= SUGGESTED_CUT_FRACTION * n_documents
            and choice.n_over_long_tokens <= SUGGESTED_CUT_FRACTION * n_tokens
        ),
        choices[-1],
    )
    cut = chosen.n_over_long_documents / n_documents
    return records.LengthSuggestion(
        sequence_length_tokens=chosen.sequence_length_tokens,
        reason=f"rows of {chosen.sequence_length_tokens} tokens are too short for"
        f" {percent(cut, 2)} of the documents and filled to {percent(chosen.fill_fraction, 2)}",
    )
