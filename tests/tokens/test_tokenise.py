from pathlib import Path

import pytest

from expertflow.core.errors import DataError
from expertflow.data.render import render_chat, render_text
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenise import tokenise
from expertflow.train.tokenizer import save_tokenizer, train_tokenizer

TEXTS = ["assistant\nSELECT name FROM users", "user\nlist all names", "a\n\nb"] * 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(TEXTS, vocab_size=400), folder)
    return Engine(folder)


def supervised_text(engine: Engine, document: tuple) -> str:  # type: ignore[type-arg]
    tokens = tokenise([document], engine)[0]
    spans = zip(tokens.spans[::2], tokens.spans[1::2], strict=True)
    return "".join(engine.decode(tokens.ids[a:b]) for a, b in spans)


def test_only_the_answer_and_its_end_are_learned(engine: Engine) -> None:
    chat = render_chat([("user", "list"), ("assistant", "SELECT 1")], supervise_all=False)
    assert supervised_text(engine, chat) == "SELECT 1<|im_end|>"
    assert supervised_text(engine, render_text("abc")) == "abc<|endoftext|>"


def test_the_ids_are_those_of_the_template_as_a_whole(engine: Engine) -> None:
    for answer in ("SELECT 1", "\nSELECT 1", "\n\nx"):
        chat = render_chat([("user", "list"), ("assistant", answer)], supervise_all=False)
        ids = tokenise([chat], engine)[0].ids
        assert engine.decode(ids) == "".join(s.text for s in chat)
        start = engine.special_id("<|im_start|>")
        last = len(ids) - ids[::-1].index(start)
        assert ids[last:-2] == engine.encode(["assistant\n" + answer])[0]


def test_special_tokens_in_data_stay_plain_text(engine: Engine) -> None:
    chat = render_chat([("user", "x<|im_end|>y"), ("assistant", "z")], supervise_all=False)
    ids = tokenise([chat], engine)[0].ids
    assert ids.count(engine.special_id("<|im_end|>")) == 2
    assert engine.decode(ids).count("<|im_end|>") == 3


def test_a_tokenizer_without_chat_marks_is_refused(engine: Engine) -> None:
    with pytest.raises(DataError, match="no token"):
        engine.special_id("<|nothing|>")


def test_the_same_texts_give_the_same_tokenizer(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        save_tokenizer(train_tokenizer(TEXTS, vocab_size=350), tmp_path / name)
    assert Engine(tmp_path / "a").sha256 == Engine(tmp_path / "b").sha256


def test_the_real_qwen_tokenizer_gives_known_ids(shared_data: Path) -> None:
    """Golden ids: the chat layout around a text that holds a special-token string."""
    qwen = Engine(shared_data / "tokenizers" / "qwen")
    chat = render_chat(
        [("user", "Hi <|im_end|> 12"), ("assistant", "SELECT 1")], supervise_all=False
    )
    tokens = tokenise([chat], qwen)[0]
    assert tokens.ids[0] == 151644
    assert tokens.ids.count(151645) == 2
    assert tokens.ids[-6:] == [77091, 198, 4858, 220, 16, 151645, 198][-6:]
    assert qwen.decode(tokens.ids) == "".join(s.text for s in chat)
    assert tokens.spans == [len(tokens.ids) - 5, len(tokens.ids) - 1]
