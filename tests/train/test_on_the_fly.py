"""Documents that are tokenized in the loop are the documents that would have been packed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from support import document_shard, tiny_tokenizer, tokenizer_record

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record, write_record
from expertflow.data.documents import KEEP
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, ShardRecord, Turn
from expertflow.data.render import Renderer
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import DocumentRows, tokenize
from expertflow.train.feed.batches import Collator
from expertflow.train.feed.on_the_fly import Documents, OnTheFlyFeed
from expertflow.train.feed.order import RowOrder

LENGTH = 40
N_BY_SHARD = (30, 25)


def body(i: int) -> Body:
    turns = (
        Turn(role="user", content=f"ask {i}", learned=False),
        Turn(role="assistant", content="tell " * (i % 9 + 1), learned=True),
    )
    return Body(turns=turns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two shards of documents of which every fifth is held out and every seventh not kept."""
    path = tmp_path_factory.mktemp("documents")
    tiny_tokenizer(path)
    first = 0
    with pa.OSFile(str(path / "keep.arrow"), "wb") as sink, pa.ipc.new_stream(sink, KEEP) as keep:
        for shard, n in enumerate(N_BY_SHARD):
            name = f"{shard:03d}"
            made = document_shard(path, [body(first + row) for row in range(n)], shard=name)
            write_record(path / f"{name}.json", made)
            rows = [row for row in range(n) if (first + row) % 7]
            columns = {
                "source": ["s"] * len(rows), "shard": [name] * len(rows), "row": rows,
                "held_out": [(first + row) % 5 == 0 for row in rows],
                "n_copies": [1 + (row == 1) for row in rows],
            }  # fmt: skip
            keep.write_batch(pa.RecordBatch.from_pydict(columns, schema=KEEP))
            first += n
    return path


def expected(folder: Path, *, held_out: bool) -> list[tuple[list[int], list[int]]]:
    numbers = []
    first = 0
    for n in N_BY_SHARD:
        for row in range(n):
            i = first + row
            if i % 7 and (i % 5 == 0) == held_out:
                numbers += [i] * (1 + (row == 1))
        first += n
    renderer = Renderer(chatml_layout())
    tokens = tokenize([renderer.render(body(i)) for i in numbers], Engine(folder))
    return [
        (
            tokens.ids[i][:LENGTH].tolist(),
            tokens.spans[i].clip(max=LENGTH).tolist(),
        )
        for i in range(len(numbers))
    ]


class Model:
    def __init__(self, folder: Path) -> None:
        self.path, self.tokenizer = str(folder), tokenizer_record()


def documents(folder: Path, *, held_out: bool) -> DocumentRows:
    made = Documents(shards=(folder / "000.json", folder / "001.json"), keep=folder / "keep.arrow")
    return made.rows(Model(folder), held_out=held_out, length=LENGTH)  # type: ignore[arg-type]


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
    taken = rows.take(np.arange(len(rows)))
    assert 0 < (taken.seq_lengths.lengths == 0).sum() < len(rows)
    collator = Collator(taken)
    batch = collator.batch(np.arange(len(rows)))
    assert batch.n_target_tokens == collator.n_targets_N.sum() > 0


def test_without_documents_there_is_nothing_to_train_on(folder: Path) -> None:
    with pytest.raises(TrainingError, match="keeps no documents"):
        Documents(shards=(), keep=folder / "keep.arrow").rows(
            Model(folder),  # type: ignore[arg-type]
            held_out=False,
            length=LENGTH,
        )
