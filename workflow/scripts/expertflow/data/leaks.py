"""Detect documents that contain benchmark questions.

A document overlaps if it shares ``n_words`` consecutive words with a benchmark text, case-folded,
without punctuation and within one turn. A shorter text must occur in full; one below ``MIN_RUN``
words must be an entire turn, since "what is it" occurs everywhere. Words are compared by 64-bit
hashes: a billion runs against a million have a 5e-5 chance of one false alarm.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertflow.core.errors import DataError
from expertflow.core.format import unescape
from expertflow.data.read import describe_file, iter_shard
from expertflow.data.reject import Reject
from expertflow.data.settings import BenchmarkSpec
from expertflow.data.shapes import compile_template
from expertflow.data.shingles import Hashes, fold_words, run_hashes, runs_at, word_hashes

MIN_RUN = 5
# Slots of the first sieve per run; under one in eight positions of a clean text passes.
SLOTS_PER_RUN = 8


class BenchmarkIndex:
    """Word runs of all benchmarks, about 30 bytes each.

    A very short text is a run with a barrier on either side. A sieve over first words skips most
    positions of a clean text; the others are looked up by length.
    """

    def __init__(self, benchmarks: Iterable[tuple[str, int, Iterable[str]]]) -> None:
        self.paths: list[str] = []
        runs: list[tuple[int, int, Hashes]] = []
        for owner, (path, n_words, texts) in enumerate(benchmarks):
            self.paths.append(path)
            for text in texts:
                # Barrier, words, barrier.
                turn = _words([text])
                n = len(turn) - 2
                if n >= min(MIN_RUN, n_words):
                    runs.append((owner, min(n, n_words), turn[1:-1]))
                elif n:
                    runs.append((owner, len(turn), turn))
        self.lengths = sorted({length for _, length, _ in runs})
        self.head = self.lengths[0] if self.lengths else 0
        parts = [(owner, run_hashes(words, n)) for owner, n, words in runs]
        keys = np.concatenate([np.empty(0, np.uint64), *(part for _, part in parts)])
        owners = np.repeat([owner for owner, _ in parts], [len(part) for _, part in parts])
        self._runs, first = np.unique(keys, return_index=True)
        self._owners = owners.astype(np.int16)[first]
        # The first ``head`` words of each run of n words.
        heads = [run_hashes(w[: len(w) - n + self.head], self.head) for _, n, w in runs]
        self._heads = np.unique(np.concatenate([np.empty(0, np.uint64), *heads]))
        # Occupied slots, by the top bits of a head's hash.
        n_bits = max(8, (SLOTS_PER_RUN * len(self._heads)).bit_length())
        self._shift = np.uint64(64 - n_bits)
        self._sieve = np.zeros(1 << n_bits, bool)
        self._sieve[self._heads >> self._shift] = True

    @classmethod
    def read(cls, specs: tuple[BenchmarkSpec, ...]) -> "BenchmarkIndex":
        """Index a manifest's benchmarks; DataError for any gap, which would leak questions."""
        return cls((spec.path, spec.n_words, _texts(spec)) for spec in specs)

    def find_overlap(self, texts: Sequence[str]) -> str | None:
        """Return the path of the first benchmark that shares a run with the texts of some turns."""
        words = _words(texts) if self.lengths else np.empty(0, np.uint64)
        if not 0 < self.head <= len(words):
            return None
        heads = run_hashes(words, self.head)
        at = np.flatnonzero(self._sieve[heads >> self._shift])
        # The sieve may pass a head with equal top bits; the sorted list decides.
        at = at[_is_in(heads[at], self._heads)]
        if not len(at):
            return None
        runs = [runs_at(words, at[at <= len(words) - n], n) for n in self.lengths]
        shared = np.concatenate([hashes[_is_in(hashes, self._runs)] for hashes in runs])
        if not len(shared):
            return None
        # The first benchmark of the manifest, whichever run was found first.
        owner = int(self._owners[np.searchsorted(self._runs, shared)].min())
        return self.paths[owner]


def _texts(spec: BenchmarkSpec) -> Iterator[str]:
    fill = compile_template(spec.text)
    file = describe_file(Path(spec.path), sha256=spec.sha256)
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
            f"benchmark {record.where}: {fault}; correct the record, or the benchmark's text"
            f" template {spec.text!r}"
        )
    if not n_texts:
        raise DataError(f"benchmark {spec.path}: no records; remove it from data.benchmarks")


def _words(texts: Sequence[str]) -> Hashes:
    # No text has NUL as a word, so no run of words crosses a turn.
    turns = (fold_words(unescape(text), punctuation=False) for text in texts)
    return word_hashes(b"\0 " + b" \0 ".join(turns) + b" \0")


def _is_in(hashes: Hashes, keys: Hashes) -> NDArray[np.bool_]:
    at = np.searchsorted(keys, hashes)
    # A hash beyond the last key is compared with the last one, and differs.
    found: NDArray[np.bool_] = keys[np.minimum(at, len(keys) - 1)] == hashes
    return found
