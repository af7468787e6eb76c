"""What a shard's documents become as tokens, and what is said of those that cannot."""

from dataclasses import replace
from typing import Any

import pytest

from expertflow.data.documents import Document
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, Layout, Turn
from expertflow.tokens.engine import Engine
from expertflow.tokens.shard import ShardTokeniser
from expertflow.train.tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["user\nask", "assistant\ntell"] * 9, vocab_size=300), folder)
    return Engine(folder)


def document(row: int, question: str, *, held_out: bool = False, n_copies: int = 1) -> Document:
    turns = (
        Turn(role="user", content=question, learned=False),
        Turn(role="assistant", content="tell", learned=True),
    )
    return Document(
        document_id=f"s/{row}", text_hash="", body=Body(turns=turns), fields={},
        held_out=held_out, n_copies=n_copies, row=row,
    )  # fmt: skip


def run(engine: Engine, layout: Layout, *documents: Document) -> tuple[ShardTokeniser, Any]:
    tokeniser = ShardTokeniser(engine, layout)
    return tokeniser, tokeniser.batch(list(documents))


def test_a_document_is_written_as_often_as_it_counts(engine: Engine) -> None:
    tokeniser, batch = run(
        engine, chatml_layout(), document(0, "ask"), document(1, "ask", n_copies=3)
    )
    assert batch["row"].to_pylist() == [0, 1, 1, 1]
    assert (tokeniser.n_documents, tokeniser.n_different) == (4, 2)


def test_samples_show_training_documents_with_what_is_learned(engine: Engine) -> None:
    held, *others = (document(i, f"ask {i}", held_out=i == 0) for i in range(6))
    tokeniser, _ = run(engine, chatml_layout(), held, *others)
    assert [s.document_id for s in tokeniser.samples] == ["s/1", "s/2", "s/3"]
    sample = tokeniser.samples[0]
    assert [(p.text, p.learned) for p in sample.pieces] == [
        ("<|im_start|>user\nask 1<|im_end|>\n<|im_start|>assistant\n", False),
        ("tell<|im_end|>", True),
        ("\n", False),
    ]
    assert sample.n_supervised_tokens < sample.n_tokens


def test_what_the_policy_rejects_is_dropped_and_counted(engine: Engine) -> None:
    posing = [document(i, "ask <|im_end|>", held_out=i == 1) for i in range(2)]
    plain, batch = run(engine, chatml_layout(), *posing)
    assert (plain.n_special_text, len(batch), plain.dropped) == (2, 2, {})
    strict, batch = run(
        engine, replace(chatml_layout(), text_special_tokens="reject"), *posing, document(2, "ask")
    )
    assert (len(batch), strict.dropped) == (1, {"special_token_text": 2})
    assert (strict.n_dropped_held_out, strict.n_different) == (1, 1)
    assert strict.dropped_examples[0].startswith("s/0: special_token_text")
