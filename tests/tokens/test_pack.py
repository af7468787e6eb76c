"""Packing end to end on token shards: rows, records, and the folder others can load."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from support import keep_list, packing_spec, token_shard

from expertflow.core import disk
from expertflow.core.errors import DataError, HardwareError
from expertflow.tokens import load_splits
from expertflow.tokens.arrow import DOCUMENTS_FILE, INDEX, PackedRows, index_batch, read_rows
from expertflow.tokens.engine import CHOSEN
from expertflow.tokens.pack import choose_length, pack_sequences
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import DecodedSample, PackingRecord, TokenShardRecord


def documents(n: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, 90, rng.integers(1, 90)).tolist() for _ in range(n)]


def pack_shards(
    folder: Path,
    shards: list[TokenShardRecord],
    held_out: dict[str, list[bool]],
    *,
    n_copies: int = 1,
    **changes: object,
) -> PackingRecord:
    keep = keep_list(folder, held_out, n_copies=n_copies)
    output = folder / "packed"
    return pack_sequences(
        expert="e", spec=packing_spec(**changes), shards=shards, keep=keep, directory=output
    )


def pack(folder: Path, *, n_shards: int = 1, **changes: Any) -> PackingRecord:
    """Pack the documents; every seventh is held out."""
    texts = documents()
    size = -(-len(texts) // n_shards)
    parts = {f"{i:03d}": range(i * size, min((i + 1) * size, 300)) for i in range(n_shards)}
    held_out = {name: [i % 7 == 0 for i in part] for name, part in parts.items()}
    shards = [
        token_shard(folder, [texts[i] for i in part], shard=name) for name, part in parts.items()
    ]
    return pack_shards(folder, shards, held_out, **changes)


def ids_of(rows: PackedRows) -> np.ndarray:
    return rows.take_ids(np.arange(len(rows)))


def pieces_of(rows: PackedRows) -> list[tuple[list[int], list[int]]]:
    """List the ids of every piece, and whether each is learned."""
    found = []
    for row, ids in enumerate(ids_of(rows)):
        learned = np.zeros(len(ids), bool)
        for a, b in rows.spans[row].reshape(-1, 2):
            learned[a:b] = True
        for a, b in pairwise([0, *np.cumsum(rows.seq_lengths[row])]):
            found.append((ids[a:b].tolist(), ids[a:b][learned[a:b]].tolist()))
    return found


@pytest.mark.parametrize("packing", ["bfd", "concat", "none"])
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_the_record_describes_the_rows(tmp_path: Path, packing: str, overflow: str) -> None:
    record = pack(tmp_path, packing=packing, overflow=overflow)
    for split in (record.train, record.held_out):
        rows = read_rows(Path(split.path))
        lengths = rows.seq_lengths.values
        pieces = pieces_of(rows)
        assert len(rows) == split.n_sequences
        assert math.ceil(split.n_tokens / 64) <= len(rows)
        assert lengths.sum() == sum(len(ids) for ids, _ in pieces) == split.n_tokens
        assert split.n_tokens == split.n_tokens_in - split.n_tokens_dropped
        assert ids_of(rows).size == split.n_tokens + split.n_padding_tokens
        assert (lengths**2).sum() == split.sum_len_sq
        n_learned = sum(len(learned) for _, learned in pieces)
        assert n_learned >= split.n_target_tokens > 0
        assert record.overflow == ("not used" if packing == "concat" else overflow)
        assert (rows.seq_lengths.lengths == 1).all() == (packing == "none")


@pytest.mark.parametrize("n_copies", [1, 2])
def test_every_piece_is_complete_with_its_supervision(tmp_path: Path, n_copies: int) -> None:
    record = pack(tmp_path, n_copies=n_copies)
    train = [d for i, d in enumerate(documents()) if i % 7 != 0]
    wanted = [(d[a : a + 64], d[max(a, 2) : a + 64]) for d in train for a in range(0, len(d), 64)]
    # Pieces without targets are left out; the first token of a piece is none.
    wanted = [(ids, learned) for ids, learned in wanted if learned and len(ids) > 1]
    assert sorted(pieces_of(read_rows(Path(record.train.path)))) == sorted(wanted * n_copies)
    lost = sum(len(d) for d in train) * n_copies - sum(len(ids) for ids, _ in wanted * n_copies)
    assert record.train.n_tokens_dropped == lost > 0


@pytest.mark.parametrize("length", [64, 128])
def test_held_out_documents_are_identified_by_their_pieces(tmp_path: Path, length: int) -> None:
    record = pack(tmp_path, n_shards=7, n_copies=2, sequence_length_tokens=length)
    assert owned_pieces(record) == [
        (i, document[a : a + length])
        for i, document in enumerate(documents()[::7])
        for a in range(0, len(document), length)
    ]
    assert not (Path(record.train.path) / DOCUMENTS_FILE).exists()


def owned_pieces(record: PackingRecord) -> list[tuple[int, list[int]]]:
    folder = Path(record.held_out.path)
    pieces = [ids for ids, _ in pieces_of(read_rows(folder))]
    # The pieces of a document are in order if the sort is stable, longest first.
    owned = zip(np.load(folder / DOCUMENTS_FILE).tolist(), pieces, strict=True)
    return sorted(owned, key=lambda one: (one[0], -len(one[1])))


@pytest.mark.parametrize("n_shards", [2, 7])
def test_the_rows_follow_from_documents_and_seed_to_the_byte(tmp_path: Path, n_shards: int) -> None:
    one, other = pack(tmp_path), pack(tmp_path, n_shards=n_shards)
    assert other.train.sha256 == one.train.sha256
    assert other.held_out.sha256 == one.held_out.sha256
    assert pack(tmp_path, seed=1).train.sha256 != one.train.sha256


def test_rows_read_back_from_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_rows(Path(pack(tmp_path).train.path))
    expected, lengths, spans = ids_of(whole), whole.seq_lengths.tolist(), whole.spans.tolist()
    monkeypatch.setattr(load_splits, "BATCH_BYTES", 7 * 64 * 4)
    rows = read_rows(Path(pack(tmp_path).train.path))
    assert len(rows.parts_NL) > 10
    assert (ids_of(rows) == expected).all()
    assert (rows.seq_lengths.tolist(), rows.spans.tolist()) == (lengths, spans)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(5, 128), (128, 128), (129, 256), (1481, 1536), (2000, 2048), (9000, 2048)],
)
def test_auto_takes_the_shortest_length_that_fits_all(longest: int, expected: int) -> None:
    length, reason = choose_length(packing_spec(sequence_length_tokens=None), longest)
    assert length == expected
    assert ("the shortest choice that fits the longest" in reason) == (longest <= length)


def test_the_record_describes_other_lengths(tmp_path: Path) -> None:
    record = pack(tmp_path)
    lengths = [len(d) for d in documents()]
    by_length = {c.sequence_length_tokens: c for c in record.choices}
    assert set(by_length) >= {512, 1024, 1536, 2048, 4096}
    assert by_length[128].n_over_long_documents == 0
    assert by_length[512].fill_fraction == sum(lengths) / (by_length[512].n_sequences * 512)
    assert (record.suggestion.sequence_length_tokens, record.histogram.max) == (128, max(lengths))
    histogram = record.histogram
    found = (histogram.p50, histogram.p90, histogram.p99)
    # One document each: as many are this short as the fraction says, or one more.
    assert found == tuple(sorted(lengths)[-(-299 * q // 100)] for q in (50, 90, 99))
    bounds = zip(histogram.edges, histogram.edges[1:], strict=False)
    assert list(histogram.counts) == [sum(a <= n < b for n in lengths) for a, b in bounds]
    assert (histogram.edges[0], histogram.edges[-1]) == (1, max(lengths) + 1)


def test_few_documents_with_many_tokens_are_not_cut(tmp_path: Path) -> None:
    # One of them just fits.
    short = [[i] * 100 for i in range(298)] + [[298] * 128]
    shard = token_shard(tmp_path, [[1] * 5000, *short])
    held_out = {"000": [False] * 299 + [True]}
    record = pack_shards(tmp_path, [shard], held_out)
    assert record.suggestion.sequence_length_tokens == 4096
    first = record.choices[0]
    assert (first.n_over_long_documents, first.n_over_long_tokens) == (1, 4872)
    assert "for 0.33 % of the documents" in record.suggestion.reason
    assert record.engines == {"tokenizers 0": 1}
    assert record.engine_fallbacks == ("a test",)
    shorter = token_shard(tmp_path, [[1] * 130, *short])
    record = pack_shards(tmp_path, [shorter], held_out)
    assert record.suggestion.sequence_length_tokens == 128
    chosen = replace(shorter, engine_reason=CHOSEN)
    assert not pack_shards(tmp_path, [chosen], held_out).engine_fallbacks


def test_only_kept_documents_count_as_dropped(tmp_path: Path) -> None:
    shard = token_shard(tmp_path, [[1, 2, i] for i in range(98)])
    refused: list[str | None] = [None] * 98 + ["chat_template"] * 2
    with pa.OSFile(shard.index_path, "wb") as sink, pa.ipc.new_stream(sink, INDEX) as writer:
        lengths, none = np.array([3] * 98 + [0, 0]), Ragged.from_lists([[]] * 100)
        writer.write_batch(index_batch(lengths, none, [False] * 100, refused))
    example = "s/98: chat_template (no system turn)"
    shard = replace(shard, n_documents=100, dropped_examples=(example,))
    # Without the token shard's spans nothing is learned: that is checked after the limit.
    limits = {(100, 0.01): r"source s: 2 of 100 documents .*s/98.*, set .*text_special_tokens"}
    limits |= dict.fromkeys([(100, 0.02), (98, 0.0)], "nothing to learn")
    for (n_kept, limit), message in limits.items():
        held_out = {"000": [i == 99 or i < 9 for i in range(n_kept)]}
        with pytest.raises(DataError, match=message):
            pack_shards(tmp_path, [shard], held_out, max_rejected_fraction=limit)


def test_dropped_documents_keep_their_number(tmp_path: Path) -> None:
    """Of four held-out documents the template cannot render the second."""
    texts = [[i] * 4 for i in range(6)]
    shard = token_shard(tmp_path, texts)
    reasons = [None, "chat_template", None, None, None, None]
    with pa.OSFile(shard.index_path, "wb") as sink, pa.ipc.new_stream(sink, INDEX) as writer:
        lengths, spans = np.full(6, 4), Ragged.from_lists([[2, 4]] * 6)
        writer.write_batch(index_batch(lengths, spans, [False] * 6, reasons))
    shard = replace(shard, dropped_examples=("s/1",))
    held_out = {"000": [True, True, False, False, True, True]}
    record = pack_shards(tmp_path, [shard], held_out, max_rejected_fraction=0.5)
    assert owned_pieces(record) == [(0, texts[0]), (2, texts[4]), (3, texts[5])]


@pytest.mark.parametrize("n_shards", [1, 2])
def test_documents_dropped_for_their_length_are_counted_once(tmp_path: Path, n_shards: int) -> None:
    record = pack(tmp_path, n_shards=n_shards, n_copies=2, overflow="drop")
    long = [len(ids) > 64 for ids in documents()]
    assert record.n_dropped_by_reason == {"longer_than_row": sum(long)}
    assert record.n_dropped_held_out == sum(long[::7])
    assert record.n_dropped_by_source == {"s": (sum(long) - sum(long[::7]), sum(long[::7]))}
    for changes in ({"overflow": "truncate"}, {"overflow": "drop", "packing": "concat"}):
        assert pack(tmp_path, n_shards=n_shards, **changes).n_dropped_by_reason == {}


def test_engines_are_recorded_in_order_and_two_are_rejected(tmp_path: Path) -> None:
    halves = {"000": documents(18)[:9], "001": documents(18)[9:]}
    first, second = (token_shard(tmp_path, part, shard=name) for name, part in halves.items())
    held_out = {"000": [True] * 9, "001": [False] * 9}
    newer = replace(first, engine_version="1", engine_reason="b")
    record = pack_shards(tmp_path, [newer, second], held_out)
    assert list(record.engines.items()) == [("tokenizers 0", 1), ("tokenizers 1", 1)]
    assert record.engine_fallbacks == ("a test", "b")
    with pytest.raises(DataError, match=r"s/000 was tokenized by tokenizers \(a test\)"):
        pack_shards(tmp_path, [first, replace(second, engine="fastokens")], held_out)


def test_rows_that_do_not_fit_on_the_disk_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda place: 100)
    with pytest.raises(HardwareError, match=r"train: .* needed for \d+ rows; "):
        pack(tmp_path)


def test_missing_tokens_are_noticed(tmp_path: Path) -> None:
    held_out = {"000": [False] * 4 + [True]}
    with pytest.raises(DataError, match="no tokens to pack"):
        pack_shards(tmp_path, [token_shard(tmp_path, [[]] * 5)], held_out)
    shard = token_shard(tmp_path, documents(5))
    ids = Path(shard.path)
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(DataError, match="but its index lists"):
        pack_shards(tmp_path, [shard], held_out)


def test_a_held_out_document_that_is_trained_on_is_rejected(tmp_path: Path) -> None:
    trained = [[9] * 100, [7, 8], [9] * 99 + [7], []]
    asked = {
        0: [[7] + [9] * 99, [9] * 101, [8, 7], [8], [7, 8, 7], []],
        2: [[9] * 100, [9] * 101, [7, 8], []],
    }
    for n_leaked, held_out in asked.items():
        parts = {"000": [], "001": trained, "002": held_out}
        shards = [token_shard(tmp_path, part, shard=name) for name, part in parts.items()]
        sides = {name: [part is held_out] * len(part) for name, part in parts.items()}
        if not n_leaked:
            pack_shards(tmp_path, shards, sides, n_copies=2)
            continue
        words = "^e: 2 held-out documents are in the training data, .* from source s as one from"
        with pytest.raises(DataError, match=words):
            pack_shards(tmp_path, shards, sides, n_copies=2)


def test_samples_show_documents_that_are_trained_on(tmp_path: Path) -> None:
    samples = tuple(
        (i, DecodedSample(document_id=f"s/{i}", n_tokens=1, n_supervised_tokens=1, pieces=()))
        for i in range(8)
    )
    shard = replace(token_shard(tmp_path, documents(9)), samples=samples)
    held_out = {"000": [True, False, False, True, False, False, False]}
    record = pack_shards(tmp_path, [shard], held_out)
    assert [s.document_id for s in record.samples] == ["s/1", "s/2", "s/4"]
