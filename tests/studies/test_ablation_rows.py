"""Unpacked rows hold exactly the same documents."""

import numpy as np
import pytest

from expertflow.studies.variants import split_documents
from expertflow.tokens.arrow import PackedRows
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
