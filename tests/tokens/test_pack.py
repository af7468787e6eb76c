"""Packing end to end on a token shard: rows, records, and the folder others can load."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import token_shard

from expertflow.core.errors import DataError
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.pack import check_dropped, choose_length, pack_sequences
from expertflow.tokens.records import PackingRecord, PackingSpec


def spec(**changes: object) -> PackingSpec:
    settings = {
        "sequence_length_tokens": 64, "packing": "bfd", "overflow": "split",
        "seed": 0, "max_rejected_fraction": 0.01,
    }  # fmt: skip
    return PackingSpec(**{**settings, **changes})  # type: ignore[arg-type]


def documents(n: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, 90, rng.integers(1, 90)).tolist() for _ in range(n)]


def pack(folder: Path, **changes: object) -> PackingRecord:
    texts = documents()
    shard = token_shard(folder, texts, [i % 7 == 0 for i in range(len(texts))])
    return pack_sequences(
        expert="e", spec=spec(**changes), shards=[shard], output=folder / "packed"
    )


@pytest.mark.parametrize("packing", ["bfd", "concat", "none"])
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_the_record_tells_what_the_rows_hold(tmp_path: Path, packing: str, overflow: str) -> None:
    record = pack(tmp_path, packing=packing, overflow=overflow)
    for split in (record.train, record.held_out):
        rows = read_rows(Path(split.path))
        lengths = [n for row in rows.seq_lengths for n in row]
        assert len(rows) == split.n_sequences >= split.n_sequences_lower_bound
        assert sum(lengths) == split.n_tokens == split.n_tokens_in - split.n_tokens_dropped
        assert rows.input_ids_NL.size == split.n_tokens + split.n_padding_tokens
        assert sum(n * n for n in lengths) == split.sum_len_sq
        for row, spans in enumerate(rows.spans):
            assert spans == sorted(spans) and len(spans) % 2 == 0
            assert not spans or spans[-1] <= sum(rows.seq_lengths[row])


def test_every_token_arrives_with_its_supervision(tmp_path: Path) -> None:
    """Rows hold the documents' ids and supervised ids, each as often as the documents do."""
    record = pack(tmp_path)
    texts = [d for i, d in enumerate(documents()) if i % 7 != 0]
    rows = read_rows(Path(record.train.path))
    ids, learned = [], []
    for row, lengths in enumerate(rows.seq_lengths):
        ids += rows.input_ids_NL[row, : sum(lengths)].tolist()
        for a, b in zip(rows.spans[row][::2], rows.spans[row][1::2], strict=True):
            learned += rows.input_ids_NL[row, a:b].tolist()
    assert sorted(ids) == sorted(t for d in texts for t in d)
    assert sorted(learned) == sorted(t for d in texts for t in d[2:])


def test_two_packings_are_equal_to_the_byte(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = pack(tmp_path / "a"), pack(tmp_path / "b")
    assert first.train.sha256 == second.train.sha256
    assert first.held_out.sha256 == second.held_out.sha256
    assert pack(tmp_path / "a", seed=1).train.sha256 != first.train.sha256


def test_the_folder_loads_with_datasets(tmp_path: Path) -> None:
    import datasets

    record = pack(tmp_path)
    loaded = datasets.load_from_disk(record.train.path)
    assert len(loaded) == record.train.n_sequences
    assert loaded[0]["input_ids"] == read_rows(Path(record.train.path)).input_ids_NL[0].tolist()
    assert set(loaded.column_names) == {"input_ids", "seq_lengths", "supervised_spans"}


@pytest.mark.parametrize(
    ("longest", "expected"), [(5, 128), (128, 128), (129, 256), (1481, 1536), (9000, 2048)]
)
def test_auto_takes_the_shortest_length_that_holds_all(longest: int, expected: int) -> None:
    assert choose_length(spec(sequence_length_tokens=None), [3, longest])[0] == expected


def test_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    shard = token_shard(tmp_path, [[1, 2], [3, 4]], [False, True])
    with pytest.raises(DataError, match="nothing to learn"):
        pack_sequences(expert="e", spec=spec(), shards=[shard], output=tmp_path / "packed")


def test_a_template_that_cannot_write_the_documents_stops_the_run(tmp_path: Path) -> None:
    shard = replace(
        token_shard(tmp_path, documents(98), [False] * 98),
        n_dropped_by_reason={"chat_template": 2},
        dropped_examples=("s/7: chat_template (no system turn)",),
    )
    with pytest.raises(DataError, match=r"source s: .* cannot write 2 of 100 documents .*s/7"):
        pack_sequences(expert="e", spec=spec(), shards=[shard], output=tmp_path / "out")
    assert check_dropped([shard], 0.02) == {"chat_template": 2}
