"""fastokens, which is many times as fast as ``tokenizers``, where it gives the same ids.

It is young, so nothing is taken on trust: every shard encodes a fixed set of awkward texts and the
first texts of its own data with both, and one id that differs sends the shard to ``tokenizers``.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from expertflow.tokens.engine import Encoder, Engine, read_settings
from expertflow.tokens.ragged import Ragged

EngineChoice = Literal["auto", "tokenizers"]
CHOSEN = "set in the manifest"


class FastEngine(Encoder):
    """fastokens, as ``Engine`` encodes."""

    name = "fastokens"

    def __init__(self, directory: Path) -> None:
        import fastokens

        self.version = metadata.version("fastokens")
        super().__init__(directory, fastokens.Tokenizer.from_json_str(read_settings(directory)))

    def encode_flat(self, texts: list[str]) -> Ragged:
        """Encode texts, their ids end to end."""
        if not texts:
            return Ragged(np.empty(0, np.int32), np.zeros(1, np.int64))
        ids, offsets = self._tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        # Ids are far below 2^31, so the sign bit is free.
        return Ragged(np.frombuffer(ids, "<i4"), np.frombuffer(offsets, "<u8").astype(np.int64))


class Chosen(NamedTuple):
    """The engine to use, and why."""

    engine: Encoder
    reason: str


def choose_engine(directory: Path, *, wanted: EngineChoice, sample: list[str]) -> Chosen:
    """Take fastokens where it agrees with ``tokenizers`` on awkward texts and on ``sample``.

    Raises:
        DataError: the directory holds no tokenizer.
    """
    if wanted == "tokenizers":
        return Chosen(Engine(directory), CHOSEN)
    if importlib.util.find_spec("fastokens") is None:
        return Chosen(Engine(directory), "fastokens is not installed")
    with ThreadPoolExecutor(1) as pool:
        # It takes a second for a large vocabulary and leaves the interpreter free meanwhile.
        loading = pool.submit(FastEngine, directory)
        slow = Engine(directory)
        try:
            fast = loading.result()
        except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
            fault = " ".join(str(error).split())[:200]
            return Chosen(slow, f"fastokens cannot load this tokenizer ({fault})")
    texts = [*AWKWARD, *sample]
    if (text := first_difference(slow, fast, texts)) is not None:
        return Chosen(slow, f"fastokens gives other ids for {text[:40]!r}")
    return Chosen(fast, f"the same ids as tokenizers {slow.version} on {len(texts)} texts")


def first_difference(one: Encoder, other: Encoder, texts: list[str]) -> str | None:
    """Give the first text for which two engines differ."""
    expected, found = one.encode_flat(texts), other.encode_flat(texts)
    for i, text in enumerate(texts):
        if not np.array_equal(found[i], expected[i]):
            return text
    return None


def _awkward_texts() -> tuple[str, ...]:
    """Make texts in which tokenizers are known to differ: Unicode, blanks, digits, contractions."""
    # Every 23rd code point of the first two planes, after a letter, a blank and a digit; the
    # surrogates are no characters.
    points = [chr(c) for c in range(1, 0x20000, 23) if not 0xD800 <= c < 0xE000]
    by_point = tuple(
        "".join(f"a{c}b {c} 1{c}" for c in points[i : i + 32]) for i in range(0, len(points), 32)
    )
    return (
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
        *by_point,
    )


AWKWARD = _awkward_texts()
