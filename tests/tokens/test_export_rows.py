"""Rows for other trainers: read with ``datasets``, compared with our own batches."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, load_from_disk
from hypothesis import given
from hypothesis import strategies as st
from support import made_up_rows

from expertflow.core.errors import DataError
from expertflow.tokens import export_rows as module
from expertflow.tokens.arrow import ROWS_FILE, PackedRows, write_rows
from expertflow.tokens.export_rows import export_rows, target_mask
from expertflow.train.feed.batches import Collator

LENGTH = 8
# The first span contains its document's first token, the second crosses into the next document,
# and the last row is full.
SEQ_LENGTHS = [[3, 2], [1], [4, 4]]
SPANS = [[0, 2, 2, 5], [], [2, 6]]
IDS = np.arange(1, 25, dtype=np.int32).reshape(3, LENGTH)
IDS[0, 5:] = IDS[1, 1:] = 0
LABELS = [
    [-100, 2, 3, -100, 5, -100, -100, -100],
    [-100] * 8,
    [-100, -100, 19, 20, -100, 22, -100, -100],
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = PackedRows.from_lists(IDS, SEQ_LENGTHS, SPANS)
    write_rows(tmp_path / "train", [rows], length=LENGTH)
    return tmp_path / "train"


def exported(source: Path, targets: module.Targets = "labels") -> Dataset:
    output = source.with_name(targets)
    export_rows(source, output, targets=targets)
    return load_from_disk(str(output))


def test_rows_contain_documents(source: Path) -> None:
    used = [slice(sum(lengths)) for lengths in SEQ_LENGTHS]
    labels = [row[part] for row, part in zip(LABELS, used, strict=True)]
    shared = {
        "input_ids": [row[part].tolist() for row, part in zip(IDS, used, strict=True)],
        "seq_lengths": SEQ_LENGTHS,
    }
    assert exported(source).to_dict() == {**shared, "labels": labels}
    mask = [[int(x != -100) for x in row] for row in labels]
    assert exported(source, "completion_mask").to_dict() == {**shared, "completion_mask": mask}


@given(seed=st.integers(0, 10**6), n_documents=st.sampled_from([1, 4, 8]))
def test_targets_are_those_of_our_own_batches(seed: int, n_documents: int) -> None:
    rows = made_up_rows(6, 32, seed=seed, n_documents=n_documents)
    chosen = np.random.default_rng(seed).permutation(len(rows))
    labels = np.where(target_mask(rows, chosen), rows.take_ids(chosen), -100)
    ours = Collator(rows).batch(chosen).labels_BL.numpy()
    # If every row has one document, our batches are cut to the longest.
    width = ours.shape[1]
    assert labels[:, :width].tolist() == ours.tolist()
    assert (labels[:, width:] == -100).all()


def test_batches_are_equal(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exported(source)
    monkeypatch.setattr(module, "BATCH_TOKENS", 2 * LENGTH)
    output = source.with_name("batched")
    done = export_rows(source, output, targets="labels")
    assert (done.n_rows, done.n_tokens, done.n_target_tokens) == (3, 14, 6)
    assert load_from_disk(str(output)).to_list() == whole.to_list()
    with pa.memory_map(str(output / ROWS_FILE)) as stream:
        assert [batch.num_rows for batch in pa.ipc.open_stream(stream)] == [2, 1]


def test_a_folder_that_is_not_a_packed_split_is_rejected(source: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=f"has no {ROWS_FILE}; choose a packed split"):
            export_rows(folder, tmp_path / "out", targets="labels")
    exported(source)
    with pytest.raises(DataError, match=r"columns .*'labels'.* are not those of packed rows"):
        export_rows(tmp_path / "labels", tmp_path / "out", targets="labels")
    with pytest.raises(DataError, match="already exists; delete it or choose another"):
        exported(source)
    (source / ROWS_FILE).write_bytes(b"none of it")
    with pytest.raises(DataError, match="not an Arrow stream"):
        export_rows(source, tmp_path / "out", targets="labels")
    assert not (tmp_path / "out").exists()
