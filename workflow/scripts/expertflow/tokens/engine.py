"""Encode texts without parsing special tokens: ``tokenizers``, or fastokens if it agrees.

fastokens is much faster but young, so every shard encodes a fixed set of awkward texts and its own
first texts with both; a single different id falls back to ``tokenizers``.
"""

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from expertflow.core.errors import DataError, single_line
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import TOKENIZER_FILES, EngineChoice

log = logging.getLogger(__name__)
TOKENIZER_FILE = TOKENIZER_FILES[0]
CHOSEN = "set in the manifest"
# As transformers stores them if the last call before saving used them; a dropout has a fraction,
# unlike the id of a token of that name.
_REMOVED = re.compile(r'"(truncation|padding)"\s*:\s*\{|"dropout"\s*:\s*\d+[.e]')


class Engine:
    """Hugging Face ``tokenizers``, encoding special tokens in text as plain characters.

    Special ids enter a document only through ``special_id``. ``reason`` says why this engine is
    used.
    """

    name = "tokenizers"
    version = str(tokenizers.__version__)
    reason = CHOSEN

    def __init__(self, directory: Path) -> None:
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise DataError(
                f"{directory}: no {TOKENIZER_FILE}; set the folder or hub id of a model that was"
                " saved with its fast tokenizer"
            )
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(_read_settings(directory))
        except Exception as error:  # tokenizers raises nothing narrower
            raise DataError(f"{path}: damaged ({error!s:.99}); save the tokenizer again") from error
        self._tokenizer.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """One above the highest id; lower ids may have gaps."""
        ids: list[int] = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        return 1 + max(ids)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def special_id(self, token: str) -> int:
        """Return the id of a special token; DataError if the tokenizer lacks it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise DataError(
                f"the tokenizer has no token {token!r}, which the chat layout needs; use a model"
                " whose tokenizer supports ChatML, e.g. of the Qwen family"
            )
        return token_id

    def encode_flat(self, texts: list[str]) -> Ragged:
        """Encode texts with nothing added around them."""
        # Unlike ``encode_batch``, it does not compute character offsets.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return Ragged.from_lists(item.ids for item in encoded)


class FastEngine(Engine):
    """The same by fastokens: encoding, decoding and special ids only."""

    name = "fastokens"

    def __init__(self, directory: Path) -> None:
        import fastokens

        self.version = metadata.version("fastokens")
        self._tokenizer = fastokens.Tokenizer.from_json_str(_read_settings(directory))

    def encode_flat(self, texts: list[str]) -> Ragged:
        if not texts:
            return Ragged.from_lists()
        ids, offsets = self._tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        # Ids are far below 2^31, so int32 is safe.
        return Ragged(np.frombuffer(ids, "<i4"), np.frombuffer(offsets, "<u8").astype(np.int64))


def _read_settings(directory: Path) -> str:
    """Read a tokenizer's JSON, without limits, dropout or the space prepended to a first word.

    A limit would truncate or pad every text, and dropout merges tokens at random. Models with that
    space have documents that start with a special token, so none of their texts comes first.
    """
    settings = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
    has_space = '"prepend_scheme"' in settings and '"first"' in settings
    # Parsing a large vocabulary is slow.
    if not has_space and not _REMOVED.search(settings):
        return settings

    def without_blank(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: without_blank(item) for key, item in value.items()}
            is_first = value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first"
            return {**value, "prepend_scheme": "never"} if is_first else value
        return [without_blank(item) for item in value] if isinstance(value, list) else value

    state = json.loads(settings) | {"truncation": None, "padding": None}
    if dropout := state["model"].pop("dropout", None):
        log.warning("%s: its dropout of %g is not used here", directory / TOKENIZER_FILE, dropout)
    state["pre_tokenizer"] = without_blank(state["pre_tokenizer"])
    return json.dumps(state, ensure_ascii=False)


def choose_engine(directory: Path, *, wanted: EngineChoice, sample: list[str]) -> Engine:
    """Choose fastokens if it agrees with ``tokenizers``; DataError without a tokenizer."""
    if wanted == "tokenizers":
        return Engine(directory)
    with ThreadPoolExecutor(1) as pool:
        # Takes a second for a large vocabulary, without holding the GIL.
        loading = pool.submit(FastEngine, directory)
        slow = Engine(directory)
        try:
            fast = loading.result()
        except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
            fault = single_line(error, 200)
            slow.reason = f"fastokens cannot load this tokenizer ({fault})"
            return slow
    texts = [*AWKWARD, *sample]
    expected, found = slow.encode_flat(texts), fast.encode_flat(texts)
    for i, text in enumerate(texts):
        if not np.array_equal(expected[i], found[i]):
            slow.reason = f"fastokens gives other ids for {text[:40]!r}"
            return slow
    fast.reason = f"the same ids as tokenizers {slow.version} on {len(texts)} texts"
    return fast


# Every 23rd code point of the first two planes, without surrogates.
_POINTS = [chr(c) for c in range(1, 0x20000, 23) if not 0xD800 <= c < 0xE000]
# Texts on which tokenizers differ: Unicode, whitespace, digits, contractions.
AWKWARD = (
    "",
    *(blank * n for blank in " \t\n\r\u00a0\u3000" for n in (1, 2, 3, 9, 300)),
    " a  b   c\t\td \n e\n\n\nf\r\n\r\ng  \n  h \u00a0 i\u2028j\u2029k\u0085l\x0bm\x0cn",
    "I'm you're he's WE'LL they'VE it'd don't l'été 'S ’s 'ſ",
    "0 12 345 6789 1,234.56 ١٢٣ ४५६ ² ½ Ⅷ 一二三 1e-5 0x1F",
    "e\u0301 \u1100\u1161\u11a8 \ufb01 \u212b a\u0327\u0301 \u0344 \u0958 \uf900 \ud7a3",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea 1\ufe0f\u20e3",
    "\ufeffbom zero\u200bwidth\u2060joiner \u202eright-to-left \u05e9\u05dc \u0645\u0631",
    "x" * 3000 + "y" * 7,
    "!?#$%&" * 200 + "\n\n" + "---===***///\\\\" * 50,
    "<|im_start|>user <|im_end|><|endoftext|> <s></s> [INST] <think>\n</think> <tool_call>",
    # Each after a letter, a space and a digit.
    *("".join(f"a{c}b {c} 1{c}" for c in _POINTS[i : i + 32]) for i in range(0, len(_POINTS), 32)),
)
