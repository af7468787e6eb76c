"""The tokenizer behind one small face: texts in, ids out, special tokens never parsed."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import tokenizers

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.tokens.ragged import Ragged, ragged

TOKENIZER_FILE = "tokenizer.json"


class Encoder(ABC):
    """What tokenizing needs of an engine; ``decode`` and ids work alike in both."""

    name: str
    version: str

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self.sha256 = sha256_file(directory / TOKENIZER_FILE)
        self._tokenizer = tokenizer

    @abstractmethod
    def encode_flat(self, texts: list[str]) -> Ragged:
        """Encode texts, adding nothing before or after them; their ids end to end."""

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def special_id(self, token: str) -> int:
        """Return the id of a special token.

        Raises:
            DataError: the tokenizer does not have it.
        """
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise DataError(
                f"the tokenizer has no token {token!r}, which the chat layout needs; use a model"
                " whose tokenizer knows ChatML, e.g. of the Qwen family"
            )
        return token_id


class Engine(Encoder):
    """Hugging Face ``tokenizers`` with special tokens off in text.

    A special-token string inside user text is encoded as the plain characters it is made of;
    special ids enter a document only through ``special_id``.
    """

    name = "tokenizers"
    version = str(tokenizers.__version__)

    def __init__(self, directory: Path) -> None:
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise DataError(f"{path}: no such tokenizer; the model needs a {TOKENIZER_FILE}")
        super().__init__(directory, tokenizers.Tokenizer.from_str(read_settings(directory)))
        self._tokenizer.encode_special_tokens = True

    def encode_whole(self, text: str) -> list[int]:
        """Encode a text in which the names of special tokens mean the tokens."""
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        return ids

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode texts, adding nothing before or after them."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [item.ids for item in encoded]

    def encode_flat(self, texts: list[str]) -> Ragged:
        """Encode texts, their ids end to end."""
        return ragged(self.encode(texts))


def read_settings(directory: Path) -> str:
    """Read a tokenizer's JSON, without the blank that some put before the first word of an input.

    Encoded by itself, every stretch of a document would count as an input of its own. Documents of
    such models begin with a special token, so none of their texts is the first.
    """
    settings = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
    if '"prepend_scheme"' not in settings or '"first"' not in settings:
        return settings

    def without_blank(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: without_blank(item) for key, item in value.items()}
            is_first = value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first"
            return {**value, "prepend_scheme": "never"} if is_first else value
        return [without_blank(item) for item in value] if isinstance(value, list) else value

    state = json.loads(settings)
    state["pre_tokenizer"] = without_blank(state["pre_tokenizer"])
    return json.dumps(state, ensure_ascii=False)
