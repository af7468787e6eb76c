"""Tokens added by a manifest are found in texts, here and by transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import pair, tiny_tokenizer
from transformers import AutoTokenizer

from expertflow.core.errors import ConfigError
from expertflow.data.render import Renderer
from expertflow.tokens.engine import Engine, FastEngine
from expertflow.tokens.records import TokenizerRecord, TokenizerSpec
from expertflow.tokens.tokenize import tokenize
from expertflow.tokens.tokenizer import prepare_tokenizer

ADDED = ("<|sql|>", "<|my schema|>", "é🙂")
TEXT = "a <|sql|>select<|im_end|> <|my schema|>b é🙂e\u0301🙂<|SQL|>"


def prepare(model: str, folder: Path, added: tuple[str, ...] = ADDED) -> TokenizerRecord:
    spec = TokenizerSpec(
        model=model, revision=None, tokenizer=None, vocab_size=300, chat_template="auto",
        text_special_tokens="reject", content={}, added_tokens=added,
    )  # fmt: skip
    return prepare_tokenizer(spec, ["some text"] * 3, folder)


def cut_vocabulary(source: Path, folder: Path, n: int = 2000) -> Path:
    """Copy a tokenizer with only its first merges: it loads instantly."""
    folder.mkdir()
    state = json.loads((source / "tokenizer.json").read_text())
    vocabulary = {token: i for token, i in state["model"]["vocab"].items() if i < n}
    merges = [m for m in state["model"]["merges"] if "".join(m).replace(" ", "") in vocabulary]
    state["model"] |= {"vocab": vocabulary, "merges": merges}
    for i, token in enumerate(state["added_tokens"], start=n):
        token["id"] = i
    (folder / "tokenizer.json").write_text(json.dumps(state))
    shutil.copy(source / "tokenizer_config.json", folder)
    return folder


def test_an_added_token_is_one_id_in_every_text(shared_data: Path, tmp_path: Path) -> None:
    # Its normalizer composes characters of one of them.
    source = cut_vocabulary(shared_data / "tokenizers" / "qwen", tmp_path / "source")
    made = tmp_path / "made"
    before, record = Engine(source), prepare(str(source), made)
    new = list(range(before.vocab_size, before.vocab_size + len(ADDED)))
    assert record.vocab_size == new[-1] + 1
    engines = Engine(made), FastEngine(made)
    ids = [engine.encode_flat([TEXT])[0].tolist() for engine in engines]
    assert ids[0] == ids[1] and [i for i in ids[0] if i in new] == new
    assert engines[0].encode_flat(list(ADDED)).tolist() == [[i] for i in new]
    reference: Any = AutoTokenizer.from_pretrained(made)
    assert len(reference) == record.vocab_size
    told = {"add_special_tokens": False, "split_special_tokens": False}
    assert reference(list(ADDED), **told).input_ids == [[i] for i in new]
    plain = TEXT.replace("<|im_end|>", "")
    assert reference(plain, **told).input_ids == engines[0].encode_flat([plain])[0].tolist()
    # All other texts keep their ids.
    other = "<think>" + plain.translate(str.maketrans("|🙂", "::"))
    assert [e.encode_flat([other])[0].tolist() for e in engines] == [
        before.encode_flat([other])[0].tolist()
    ] * 2


def test_transformers_finds_them_if_the_settings_list_added_tokens(tmp_path: Path) -> None:
    source = tiny_tokenizer(tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    listed = {str(token.pop("id")): token for token in added}
    settings |= {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": listed}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    record = prepare(str(source), tmp_path / "made")
    reference: Any = AutoTokenizer.from_pretrained(tmp_path / "made")
    n = record.vocab_size
    assert type(reference).__name__ == "Qwen2Tokenizer" and len(reference) == n
    assert reference(list(ADDED)).input_ids == [[n - 3], [n - 2], [n - 1]]


def test_a_user_may_write_one_even_if_special_tokens_are_rejected(tmp_path: Path) -> None:
    record = prepare("builtin:tiny-qwen3", tmp_path / "made")
    assert record.layout == prepare("builtin:tiny-qwen3", tmp_path / "other", ()).layout
    assert record.layout.text_special_tokens == "reject"
    segments = Renderer(record.layout).render(pair("<|sql|> which?", "this <|sql|>"))
    [ids] = tokenize([segments], Engine(tmp_path / "made")).ids.tolist()
    assert ids.count(record.vocab_size - 3) == 2


@pytest.mark.parametrize("known", ["<|im_end|>", "a"])
def test_an_existing_token_is_rejected(tmp_path: Path, known: str) -> None:
    tiny_tokenizer(tmp_path / "source")
    with pytest.raises(
        ConfigError, match=r"data\.added_tokens: '.*' is already in the model's tokenizer"
    ):
        prepare(str(tmp_path / "source"), tmp_path / "made", ("<|sql|>", known))


def test_without_added_tokens_the_files_are_copied_unchanged(tmp_path: Path) -> None:
    source = tiny_tokenizer(tmp_path / "source")
    prepare(str(source), tmp_path / "made", ())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
