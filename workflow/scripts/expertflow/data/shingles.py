"""Hash a text's words and runs of words (shingles) to 64 bits with numpy.

Words are case-folded and separated by whitespace; in scripts written without spaces each letter is
a word. A word's hash is a polynomial over its bytes modulo 2^64, a run's is one over its words,
mixed at the end. Fixed constants keep hashes comparable across versions; they do not resist
adversaries.
"""

import re
import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

from expertflow.core.format import cut_text

Hashes = NDArray[np.uint64]

# Both odd, hence invertible, and 5 modulo 8, so their powers have period 2^62.
BYTE_BASE = 0x9E3779B97F4A7C15
WORD_BASE = 0xD1342543DE82EF95
MASK = (1 << 64) - 1
# Positions handled at once: the 1 MiB table of powers stays in the CPU cache.
PIECE = 1 << 17

# splitmix64 (Steele, Lea, Flood 2014), Stafford's variant 13
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

BLANK = 0x20
_BLANKS = bytes([*range(1, 14), *range(0x1C, 0x20), BLANK])
_PUNCTUATION = bytes(c for c in range(0x21, 0x80) if not (chr(c).isalnum() or chr(c) == "_"))
# Marks within words that ``\w`` misses: accents, points, Indic vowel signs.
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u109f\u1780-\u17ff"
_NOT_A_WORD = re.compile(f"[^\\w{_MARKS}]+")
_NO_BLANKS_BETWEEN = re.compile(
    "[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def fold_words(text: str, *, punctuation: bool) -> bytes:
    """Return a text's case-folded words in UTF-8; without ``punctuation`` it separates words."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).casefold()
        text = " ".join(text.split()) if punctuation else _NOT_A_WORD.sub(" ", text)
        # Thai, Lao, Japanese and Chinese: each letter is a word.
        text = _NO_BLANKS_BETWEEN.sub(r" \g<0> ", text)
    return text.encode("utf-8", "surrogatepass").translate(_table(punctuation))


def word_hashes(raw: bytes) -> Hashes:
    # Words longer than a piece are cut, too, always at the same positions.
    pieces = [_word_hashes(piece) for piece in cut_text(raw, b" ", PIECE)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def run_hashes(words: Hashes, n: int) -> Hashes:
    """Hash all runs of ``n`` words in order: max(0, len(words) - n + 1) of them."""
    n_runs = max(0, len(words) - n + 1)
    # Powers are tabulated up to PIECE; longer texts are hashed in pieces, with n - 1 words shared.
    if n_runs <= PIECE - n:
        return _run_hashes(words, n, n_runs)
    starts = range(0, n_runs, PIECE - n)
    parts = (words[start : start + PIECE - 1] for start in starts)
    return np.concatenate([_run_hashes(part, n, len(part) - n + 1) for part in parts])


def runs_at(words: Hashes, starts: NDArray[np.int64], n: int) -> Hashes:
    terms = words[starts[:, None] + np.arange(n)] * _powers(WORD_BASE)[0][:n]
    return mix_bits(terms.sum(axis=1, dtype=np.uint64) ^ _salt(n))


def mix_bits(values: Hashes) -> Hashes:
    values = values ^ (values >> _S30)
    values *= _M1
    values ^= values >> _S27
    values *= _M2
    values ^= values >> _S31
    return values


def random_numbers(n: int, *, seed: int) -> Hashes:
    start = seed * WORD_BASE & MASK
    steps = [(start + i * BYTE_BASE) & MASK for i in range(1, n + 1)]
    return mix_bits(np.array(steps, np.uint64))


def _run_hashes(words: Hashes, n: int, n_runs: int) -> Hashes:
    if n_runs <= 0:
        return np.empty(0, np.uint64)
    powers, inverses = _powers(WORD_BASE)
    sums = np.empty(len(words) + 1, np.uint64)
    sums[0] = 0
    np.cumsum(words * powers[: len(words)], out=sums[1:])
    runs = sums[n : n + n_runs] - sums[:n_runs]
    # A run at word i was summed with powers from i on; divide by the i-th.
    runs *= inverses[:n_runs]
    runs ^= _salt(n)
    return mix_bits(runs)


def _salt(n: int) -> np.uint64:
    # Salted by length, so that runs of several lengths can share one index.
    return np.uint64(n * BYTE_BASE & MASK)


def _word_hashes(raw: bytes) -> Hashes:
    letters = np.frombuffer(b" " + raw, np.uint8)
    blank = letters == BLANK
    # Where a blank precedes a letter; the leading blank includes the first word.
    starts = np.flatnonzero(blank[:-1] > blank[1:])
    if not len(starts):
        return np.empty(0, np.uint64)
    powers, inverses = _powers(BYTE_BASE)
    terms = _letters()[letters[1:]]
    terms *= powers[: len(terms)]
    sums: Hashes = np.add.reduceat(terms, starts)
    sums *= inverses[starts]
    return sums


@cache
def _powers(base: int) -> tuple[Hashes, Hashes]:
    tables = []
    for factor in (base, pow(base, -1, 1 << 64)):
        steps = np.full(PIECE, factor, np.uint64)
        # 1, b, b^2, ... modulo 2^64
        steps[0] = 1
        tables.append(np.multiply.accumulate(steps))
    return tables[0], tables[1]


@cache
def _letters() -> Hashes:
    # A random number per byte; a space adds nothing to the preceding word.
    numbers = random_numbers(256, seed=1)
    numbers[BLANK] = 0
    return numbers


@cache
def _table(punctuation: bool) -> bytes:
    table = bytearray(range(256))
    for code in (*_BLANKS, 0, 0x7F, *(b"" if punctuation else _PUNCTUATION)):
        table[code] = BLANK
    for code in range(ord("A"), ord("Z") + 1):
        table[code] += 32
    return bytes(table)
