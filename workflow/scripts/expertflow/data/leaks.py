"""Detect documents that contain benchmark questions.

A document overlaps if it shares ``n_words`` successive words with a benchmark text, case-folded,
without punctuation and within one turn. A shorter text must occur in full; one below ``MIN_RUN``
words must be an entire turn, since "what is it" occurs everywhere. Words are compared by 64-bit
hashes: a billion runs against a million have a 5e-5 chance of one false alarm.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.records import Record
from expertflow.data.read import describe, iter_shard
from expertflow.data.reject import Reject
from expertflow.data.settings import BenchmarkSpec
from expertflow.data.shapes import filler
from expertflow.data.shingles import BARRIER, Hashes, run_hashes, runs_at, spelled, word_hashes

MIN_RUN = 5
# Slots of the first sieve per run; under one in eight positions of a clean text passes.
SLOTS_PER_RUN = 8
NOBODY = int(np.iinfo(np.int16).max)


class _Table(Record, frozen=True):
    keys: Hashes
    owners: NDArray[np.int16]

    @classmethod
    def of(cls, parts: list[tuple[int, Hashes]]) -> "_Table":
        keys = np.concatenate([np.empty(0, np.uint64), *(part for _, part in parts)])
        owners = np.repeat([owner for owner, _ in parts], [len(part) for _, part in parts])
        keys, first = np.unique(keys, return_index=True)
        return cls(keys, owners.astype(np.int16)[first])

    def owner(self, hashes: Hashes) -> int:
        hashes = hashes[_is_in(hashes, self.keys)]
        return int(self.owners[np.searchsorted(self.keys, hashes)].min(initial=NOBODY))


class BenchmarkIndex:
    """Word runs of all benchmarks, about 30 bytes each.

    A sieve over first words skips most positions of a clean text; the rest are looked up by length.
    """

    def __init__(self, benchmarks: Iterable[tuple[str, int, Iterable[str]]]) -> None:
        short: list[tuple[int, Hashes]] = []
        self.paths: list[str] = []
        long: list[tuple[int, int, Hashes]] = []
        for owner, (path, n_words, texts) in enumerate(benchmarks):
            self.paths.append(path)
            for text in texts:
                words = _words([text])
                length = n_words if len(words) >= n_words else len(words)
                if length >= min(MIN_RUN, n_words):
                    long.append((owner, length, words))
                elif length:
                    short.append((owner, run_hashes(words, length)))
        self.lengths = sorted({length for _, length, _ in long})
        self.head = self.lengths[0] if self.lengths else 0
        self._runs = _Table.of([(owner, run_hashes(words, n)) for owner, n, words in long])
        self._short = _Table.of(short)
        heads = [run_hashes(w[: len(w) - n + self.head], self.head) for _, n, w in long]
        self._heads = np.unique(np.concatenate([np.empty(0, np.uint64), *heads]))
        # Occupied slots, by the top bits of a head's hash.
        n_bits = max(8, (SLOTS_PER_RUN * len(self._heads)).bit_length())
        self._shift = np.uint64(64 - n_bits)
        self._sieve = np.zeros(1 << n_bits, bool)
        self._sieve[self._heads >> self._shift] = True
        self._barrier = np.uint64(word_hashes(BARRIER.encode())[0])

    @classmethod
    def read(cls, specs: tuple[BenchmarkSpec, ...]) -> "BenchmarkIndex":
        """Index a manifest's benchmarks; DataError for any gap, which would leak questions."""
        return cls((spec.path, spec.n_words, _texts(spec)) for spec in specs)

    def find(self, texts: Sequence[str]) -> str | None:
        if not self.paths:
            return None
        words = _words(texts)
        owner = min(self._run_owner(words), self._short_owner(words))
        return None if owner == NOBODY else self.paths[owner]

    def _run_owner(self, words: Hashes) -> int:
        if not self.head or len(words) < self.head:
            return NOBODY
        heads = run_hashes(words, self.head)
        at = np.flatnonzero(self._sieve[heads >> self._shift])
        if len(at):
            at = at[_is_in(heads[at], self._heads)]
        if not len(at):
            return NOBODY
        return min(
            self._runs.owner(runs_at(words, at[at <= len(words) - length], length))
            for length in self.lengths
        )

    def _short_owner(self, words: Hashes) -> int:
        if not len(self._short.keys):
            return NOBODY
        ends = np.flatnonzero(np.append(words, self._barrier) == self._barrier)
        starts = np.append(0, ends[:-1] + 1)
        sizes = ends - starts
        return min(
            self._short.owner(runs_at(words, starts[sizes == length], length))
            for length in range(1, MIN_RUN)
        )


def _texts(spec: BenchmarkSpec) -> Iterator[str]:
    fill = filler(spec.text)
    file = describe(Path(spec.path), sha256=spec.sha256)
    n_texts = 0
    for record in iter_shard((file,), index=0, n_shards=1):
        fault = record.fault
        if record.value is not None:
            try:
                yield fill(record.value)
                n_texts += 1
                continue
            except Reject as reject:
                fault = reject
        raise DataError(
            f"benchmark {record.where}: {fault}; mend the record, or the benchmark's text template"
            f" {spec.text!r}"
        )
    if not n_texts:
        raise DataError(f"benchmark {spec.path}: no record; remove it from data.benchmarks")


def _words(texts: Sequence[str]) -> Hashes:
    return word_hashes(b" \0 ".join(spelled(text, punctuation=False) for text in texts))


def _is_in(hashes: Hashes, keys: Hashes) -> NDArray[np.bool_]:
    if not len(keys):
        return np.zeros(len(hashes), bool)
    at = np.searchsorted(keys, hashes)
    found: NDArray[np.bool_] = keys[np.minimum(at, len(keys) - 1)] == hashes
    return found
