from collections.abc import Sequence
from pathlib import Path

import pytest
from support import pair, tiny_tokenizer

from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, Segment
from expertflow.data.render import Renderer
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def chat(answer: str, question: str = "list") -> tuple[Segment, ...]:
    return Renderer(chatml_layout()).render(pair(question, answer))


def alone(document: Sequence[Segment], engine: Engine) -> tuple[list[int], list[int]]:
    tokens = tokenize([document], engine)
    return tokens.ids[0].tolist(), tokens.spans[0].tolist()


def supervised_text(engine: Engine, document: tuple[Segment, ...]) -> str:
    ids, spans = alone(document, engine)
    return "".join(engine.decode(ids[a:b]) for a, b in zip(spans[::2], spans[1::2], strict=True))


def test_only_the_answer_and_its_end_are_learned(engine: Engine) -> None:
    assert supervised_text(engine, chat("SELECT 1")) == "SELECT 1<|im_end|>"
    text = Renderer(chatml_layout()).render(Body(text="abc"))
    assert supervised_text(engine, text) == "abc<|endoftext|>"


def test_learning_may_end_inside_a_text(engine: Engine) -> None:
    text = "user\nlist all names and SELECT name FROM users"
    start, end = text.index(" all"), text.index(" and")
    segment = Segment(text, learned=((start, end), (len(text) - 6, len(text))))
    assert supervised_text(engine, (segment,)) == " all names users"


def blank_first(folder: Path) -> Engine:
    """Make a tokenizer that puts a blank before the first word of an input, as some families do."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<s>", "\u2581", "a", "b", "\u2581a", "[unk]"])}
    tokenizer = Tokenizer(models.BPE(words, [("\u2581", "a")], unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Engine(folder)


def test_a_blank_before_the_first_word_is_for_the_first_word_alone(tmp_path: Path) -> None:
    engine = blank_first(tmp_path)
    segments = (Segment("<s>", special=True), Segment("ab"), Segment("<s>", special=True))
    assert (
        alone(segments, engine)[0] == engine.encode_with_special_tokens("<s>ab<s>") == [0, 2, 3, 0]
    )
    assert engine.encode_flat(["<s>"]).tolist() != [[0]]


def test_many_documents_are_tokenized_as_each_alone(engine: Engine) -> None:
    text = "user\nlist all names and SELECT name FROM users"
    inner = Segment(text, learned=((5, 9), (9, 13), (20, len(text))))
    documents = [
        chat("SELECT 1"), (), (inner,), chat("\n\nx", "list all"), (Segment("a"), inner), chat("z"),
    ]  # fmt: skip
    together = tokenize(documents, engine)
    each = [alone(document, engine) for document in documents]
    assert list(zip(together.ids.tolist(), together.spans.tolist(), strict=True)) == each
    assert each[1] == ([], [])
    assert len(tokenize([], engine).ids) == 0
