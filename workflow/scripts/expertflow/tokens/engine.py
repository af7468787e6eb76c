"""The tokenizer behind one small face: texts in, lists of ids out, special tokens never parsed."""

from pathlib import Path

import tokenizers

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file

TOKENIZER_FILE = "tokenizer.json"


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
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode texts, adding nothing before or after them."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [item.ids for item in encoded]

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def special_id(self, token: str) -> int:
        """Give the id of a special token.

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
