"""Unpacked rows hold exactly the same documents."""

from pathlib import Path

import numpy as np
import pytest
from support import write_tiny_run

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.studies.variants import first_rows, split_documents, write_unpacked
from expertflow.tokens.arrow import PackedRows, read_rows
from expertflow.tokens.records import PackingRecord
from expertflow.train.feed.batches import Collator, targets_per_row

Document = tuple[tuple[int, ...], tuple[int, ...]]


def documents_of(rows: PackedRows) -> list[Document]:
    """Return ids and labels of every document, from the batches of training."""
    found = []
    for i in range(len(rows)):
        batch = Collator(rows).batch(np.array([i]))
        ids, labels = batch.input_ids_BL[0].tolist(), batch.labels_BL[0].tolist()
        start = 0
        for length in rows.seq_lengths[i].tolist():
            end = start + length
            found.append((tuple(ids[start:end]), tuple(labels[start:end])))
            start = end
    return found


def random_rows(seed: int, *, n_rows: int = 40, length: int = 48) -> PackedRows:
    """Pack documents of random lengths, each with up to two supervised spans."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((n_rows, length), np.int32)
    lengths: list[list[int]] = []
    spans: list[list[int]] = []
    for row in range(n_rows):
        lengths.append([])
        spans.append([])
        at = 0
        while at < length - 4 and (not lengths[-1] or rng.random() < 0.7):
            n = int(rng.integers(1, length - at + 1))
            ids[row, at : at + n] = rng.integers(1, 1000, n)
            edges = np.unique(rng.integers(0, n + 1, 4)) + at
            spans[-1] += edges[: len(edges) // 2 * 2].tolist()
            lengths[-1].append(n)
            at += n
    return PackedRows.from_lists(ids, lengths, spans)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_added_or_relabeled(seed: int) -> None:
    rows = random_rows(seed)
    chosen = np.random.default_rng(seed).permutation(len(rows))[:17]
    loose = split_documents(rows, chosen)
    assert len(loose.seq_lengths.values) == len(loose)
    packed = [document for i in chosen for document in documents_of(take(rows, i))]
    assert documents_of(loose) == packed
    assert targets_per_row(loose).sum() == targets_per_row(rows)[chosen].sum()


def take(rows: PackedRows, i: int) -> PackedRows:
    which = np.array([i])
    return PackedRows((rows.take_ids(which),), rows.seq_lengths.take(which), rows.spans.take(which))


def test_the_folder_is_one_that_training_reads(tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    plan = read_record(TrainPlan, tmp_path / "plan.json")
    rows = read_rows(tmp_path / "packed" / "train")
    n_steps = plan.n_steps_per_epoch
    first = first_rows(plan, rows, n_steps=n_steps)
    write_unpacked(tmp_path / "packed", tmp_path / "loose", first)
    loose = read_rows(tmp_path / "loose" / "train")
    # The steps of an epoch cover every document.
    packing = read_record(PackingRecord, tmp_path / "packing.json")
    assert sorted(first.chosen) == list(range(len(rows)))
    assert sorted(documents_of(loose)) == sorted(documents_of(rows))
    assert int(loose.seq_lengths.values.sum()) == packing.train.n_tokens == first.n_tokens
    held_out = read_rows(tmp_path / "loose" / "held_out")
    assert len(held_out) == packing.held_out.n_sequences
