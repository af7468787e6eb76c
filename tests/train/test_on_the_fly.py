"""Documents that are tokenized in the loop are the documents that would have been packed."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from support import document_shard, pair, tiny_tokenizer, tokenizer_record

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record, write_record
from expertflow.data.documents import KEEP
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, ShardRecord
from expertflow.data.render import Renderer
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import DocumentRows, tokenize
from expertflow.train.feed.batches import Collator
from expertflow.train.feed.on_the_fly import Documents, OnTheFlyFeed
from expertflow.train.feed.order import RowOrder

LENGTH = 40
SHARDS = {"000": range(30), "001": range(30, 55)}
# The numbers of the documents that are kept: the second one of a shard twice.
KEPT = {name: [i for i in numbers if i % 7] for name, numbers in SHARDS.items()}
COPIES = {numbers[1]: 2 for numbers in SHARDS.values()}


def body(i: int) -> Body:
    return pair(f"ask {i}", "tell " * (i % 9 + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two shards of documents of which every fifth is held out."""
    path = tmp_path_factory.mktemp("documents")
    tiny_tokenizer(path)
    with pa.OSFile(str(path / "keep.arrow"), "wb") as sink, pa.ipc.new_stream(sink, KEEP) as keep:
        for name, numbers in SHARDS.items():
            made = document_shard(path, [body(i) for i in numbers], shard=name)
            write_record(path / f"{name}.json", made)
            kept = KEPT[name]
            columns = {
                "source": ["s"] * len(kept), "shard": [name] * len(kept),
                "row": [i - numbers[0] for i in kept], "held_out": [i % 5 == 0 for i in kept],
                "n_copies": [COPIES.get(i, 1) for i in kept],
            }  # fmt: skip
            keep.write_batch(pa.RecordBatch.from_pydict(columns, schema=KEEP))
    return path


def expected(folder: Path, *, held_out: bool) -> list[tuple[list[int], list[int]]]:
    chosen = [i for kept in KEPT.values() for i in kept if (i % 5 == 0) == held_out]
    renderer, numbers = (
        Renderer(chatml_layout()),
        [i for i in chosen for _ in range(COPIES.get(i, 1))],
    )
    tokens = tokenize([renderer.render(body(i)) for i in numbers], Engine(folder))
    ids, spans = tokens.ids, tokens.spans
    return [
        (ids[n][:LENGTH].tolist(), spans[n].clip(max=LENGTH).tolist()) for n in range(len(numbers))
    ]


def documents(
    folder: Path, *, held_out: bool, shards: Sequence[str] = tuple(SHARDS)
) -> DocumentRows:
    model: Any = SimpleNamespace(path=str(folder), tokenizer=tokenizer_record())
    paths = tuple(folder / f"{name}.json" for name in shards)
    made = Documents(shards=paths, keep=folder / "keep.arrow")
    return made.rows(model, held_out=held_out, length=LENGTH)


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_are_the_kept_documents(folder: Path, held_out: bool) -> None:
    rows = documents(folder, held_out=held_out)
    wanted = expected(folder, held_out=held_out)
    assert len(rows) == len(wanted) > 5
    order = np.arange(len(rows))[::-1]
    taken = rows.take(order)
    ids_NL = taken.take_ids(np.arange(len(order)))
    for at, i in enumerate(order.tolist()):
        ids, spans = wanted[i]
        assert ids_NL[at, : len(ids)].tolist() == ids
        assert not ids_NL[at, len(ids) :].any()
        assert taken.seq_lengths[at].tolist() == [len(ids)]
        assert taken.spans[at].tolist() == spans


def test_a_step_reads_the_rows_of_its_order(folder: Path) -> None:
    rows = documents(folder, held_out=False)
    order = RowOrder(n_rows=len(rows), global_batch=6, seed=3)
    feed = OnTheFlyFeed(documents=rows, order=order, micro_batch_size=4, n_steps=12)
    whole = rows.take(np.arange(len(rows)))
    batches = feed.batches_from(2)
    for step in range(2, 12):
        chosen = order.rows_of_step(step)
        n_targets = feed.count_tokens(step)[0]
        seen, found = 0, []
        for _ in feed.micro_batches(step):
            batch = next(batches)
            found += batch.input_ids_BL.shape[0] * [batch.max_length]
            seen += batch.n_target_tokens
            assert batch.n_tokens > 0
        assert (seen, len(found)) == (n_targets, len(chosen))
        assert n_targets == Collator(whole).n_targets_N[chosen].sum()
    assert next(batches, None) is None


def test_what_the_model_cannot_be_given_is_an_empty_row(folder: Path) -> None:
    special = ("ask 1", "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    layout = replace(chatml_layout(), special_tokens=special, text_special_tokens="reject")
    rows = DocumentRows(
        [read_record(ShardRecord, folder / "000.json")], folder / "keep.arrow", held_out=False,
        tokenizer=folder, layout=layout, length=LENGTH,
    )  # fmt: skip
    everything = np.arange(len(rows))
    taken = rows.take(everything)
    assert 0 < (taken.seq_lengths.lengths == 0).sum() < len(rows)
    collator = Collator(taken)
    assert collator.batch(everything).n_target_tokens == collator.n_targets_N.sum() > 0


def test_without_documents_there_is_nothing_to_train_on(folder: Path) -> None:
    with pytest.raises(TrainingError, match="keeps no documents"):
        documents(folder, held_out=False, shards=())
