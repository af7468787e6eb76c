"""The tokenizer behind one small face: texts in, ids out, special tokens never parsed."""

import json
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.tokens.ragged import Ragged, ragged

TOKENIZER_FILE = "tokenizer.json"


class Encoder(Protocol):
    """What tokenising needs of an engine."""

    name: str
    version: str
    sha256: str

    def encode_flat(self, texts: list[str]) -> Ragged:
        """Encode texts, adding nothing before or after them; their ids end to end."""

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special tokens included."""

    def special_id(self, token: str) -> int:
        """Give the id of a special token."""


class Engine:
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
        self.sha256 = sha256_file(path)
        self._tokenizer = tokenizers.Tokenizer.from_str(read_settings(directory))
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

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def special_id(self, token: str) -> int:
        """Give the id of a special token.

        Raises:
            DataError: the tokenizer does not have it.
        """
        return checked_id(token, self._tokenizer.token_to_id(token))


def checked_id(token: str, token_id: int | None) -> int:
    """Give a special token's id.

    Raises:
        DataError: the tokenizer does not have it.
    """
    if token_id is None:
        raise DataError(
            f"the tokenizer has no token {token!r}, which the chat layout needs; use a model"
            " whose tokenizer knows ChatML, e.g. of the Qwen family"
        )
    return token_id


def read_settings(directory: Path) -> str:
    """Read a tokenizer's JSON as stretches of documents are encoded with it."""
    return without_first_blank((directory / TOKENIZER_FILE).read_text(encoding="utf-8"))


def without_first_blank(settings: str) -> str:
    """Let no text get the blank that some tokenizers put before the first word of an input.

    Encoded by itself, every stretch of a document would count as an input of its own. Documents of
    such models begin with a special token, so none of their texts is the first.
    """
    if '"prepend_scheme"' not in settings or '"first"' not in settings:
        return settings

    def mended(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: mended(item) for key, item in value.items()}
            return {**value, "prepend_scheme": "never"} if _puts_blank_first(value) else value
        return [mended(item) for item in value] if isinstance(value, list) else value

    state = json.loads(settings)
    state["pre_tokenizer"] = mended(state["pre_tokenizer"])
    return json.dumps(state, ensure_ascii=False)


def _puts_blank_first(value: dict[str, Any]) -> bool:
    return value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first"
