"""Find near-duplicate documents with banded MinHash signatures (LSH).

A signature has, for each of ``n_permutations`` random functions, the minimum over the document's
runs of ``n_words`` words; a shorter text is one run. The share of equal values estimates the
Jaccard similarity J of the runs, with standard error sqrt(J (1 - J) / n_permutations): 0.035 at J =
0.8 and 128 permutations. Signatures are cut into b bands of r values; two documents are compared if
a band is equal, with probability 1 - (1 - J^r)^b. r is the largest that finds a pair at the
threshold with a probability of at least 0.95, for the fewest chance matches.
"""

import math
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertflow.core.disk import check_space
from expertflow.data import shingles
from expertflow.data.settings import NearSpec, SignatureSpec

Rows = NDArray[np.int64]
Halves = NDArray[np.uint32]
Signatures = NDArray[np.uint32]
Leaders = NDArray[np.int32]

RECALL = 0.95
# Maximum documents of one bucket that any other is compared with. If more share a band without
# being near (one long template), another band must match the pair.
MAX_ROUNDS = 16
RUNS_AT_ONCE = 2048
PAIRS_AT_ONCE = 1 << 13


class Signer:
    """Makes signatures that are byte-identical across machines and versions."""

    def __init__(self, spec: SignatureSpec) -> None:
        self.n_words = spec.n_words
        # x -> factor * x + shift modulo 2^32 is a bijection for odd factors
        numbers = (shingles.random_numbers(spec.n_permutations, seed=seed) for seed in (2, 3))
        factors, self._shifts = (_half(each)[:, None] for each in numbers)
        self._factors = factors | np.uint32(1)

    def sign(self, text: str) -> bytes:
        """Return ``n_permutations`` little-endian uint32 values."""
        words = shingles.word_hashes(shingles.fold_words(text, punctuation=True))
        hashes = shingles.run_hashes(words, max(1, min(self.n_words, len(words))))
        # A text without words is signed as the single run 0.
        runs = _half(hashes) if len(hashes) else np.zeros(1, np.uint32)
        least = self._least(runs[:RUNS_AT_ONCE])
        for start in range(RUNS_AT_ONCE, len(runs), RUNS_AT_ONCE):
            least = np.minimum(least, self._least(runs[start : start + RUNS_AT_ONCE]))
        return least.astype("<u4", copy=False).tobytes()

    def _least(self, runs: Halves) -> Halves:
        values = self._factors * runs
        values += self._shifts
        least: Halves = values.min(axis=1)
        return least


def _half(hashes: shingles.Hashes) -> Halves:
    return (hashes >> np.uint64(32)).astype(np.uint32)


def choose_bands(spec: NearSpec) -> tuple[int, int]:
    """Return the number of bands and of values per band."""
    n = spec.n_permutations
    # Widest band first: it has the fewest chance matches.
    for n_values in range(n, 1, -1):
        n_bands = n // n_values
        # The chance that two documents have an equal band.
        if 1 - (1 - spec.threshold**n_values) ** n_bands >= RECALL:
            return n_bands, n_values
    return n, 1


class NearIndex:
    """Signatures and band keys in temporary files: 656 bytes per document by default."""

    def __init__(self, spec: NearSpec, *, n_documents: int, folder: Path) -> None:
        self.spec, self.n_documents = spec, n_documents
        self.n_bands, self.n_values = choose_bands(spec)
        # Without the 1e-9, 0.55 x 100 (55.00000000000001) would need 56 equal values.
        self.n_needed = math.ceil(spec.threshold * spec.n_permutations - 1e-9)
        self._n_added = 0
        n_bytes = n_documents * (4 * spec.n_permutations + 8 * self.n_bands)
        fix = "free some, or lower data.near_duplicates.n_permutations"
        check_space([(folder, n_bytes, "near-duplicate detection")], fix=fix)
        self._signatures = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._keys = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def close(self) -> None:
        self._signatures.close()
        self._keys.close()

    def add(self, signatures: Signatures) -> None:
        self._signatures.write(np.ascontiguousarray(signatures, np.uint32).data)
        n_bands, n_values = self.n_bands, self.n_values
        # Values beyond the last band are used only to compare.
        used = signatures[:, : n_bands * n_values].astype(np.uint64)
        factors = shingles.random_numbers(n_values, seed=4) | np.uint64(1)
        parts = used.reshape(len(used), n_bands, n_values)
        by_document = shingles.mix_bits((parts * factors).sum(axis=2, dtype=np.uint64))
        for band, keys in enumerate(by_document.T):
            # The file holds all keys of band 0, then all of band 1: [n_bands, n_documents].
            self._keys.seek(8 * (band * self.n_documents + self._n_added))
            self._keys.write(np.ascontiguousarray(keys).data)
        self._n_added += len(signatures)

    def find_leaders(self) -> Leaders:
        """Return each document's earlier near-duplicate, or -1; only the order matters.

        In each bucket of equal bands, the first document without a leader leads all later ones near
        it; then the next without one, up to ``MAX_ROUNDS`` times. All chains end at a kept
        document.
        """
        self._signatures.flush()
        self._keys.flush()
        leaders = np.full(self.n_documents, -1, np.int32)
        for band in range(self.n_bands if self.n_documents else 0):
            start, shape = 8 * band * self.n_documents, self.n_documents
            keys = np.memmap(self._keys, np.uint64, "r", offset=start, shape=shape)
            self._lead(*find_buckets(keys), leaders)
        return leaders

    def count_matches(self, first: Rows, second: Rows) -> NDArray[np.int32]:
        counts = np.empty(len(first), np.int32)
        for start in range(0, len(first), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            pairs = self._read(np.concatenate([first[part], second[part]]))
            counts[part] = (pairs[: len(pairs) // 2] == pairs[len(pairs) // 2 :]).sum(axis=1)
        return counts

    def _read(self, rows: Rows) -> Signatures:
        # One by one: mapped pages would count toward this job's memory.
        unique, places = np.unique(rows, return_inverse=True)
        signatures = np.empty((len(unique), self.spec.n_permutations), np.uint32)
        stream, width = self._signatures.fileno(), 4 * self.spec.n_permutations
        for place, row in enumerate(unique.tolist()):
            os.preadv(stream, [signatures[place]], row * width)
        return signatures[places]

    def _lead(self, rows: Rows, bucket: Rows, leaders: Leaders) -> None:
        for _ in range(MAX_ROUNDS):
            free = leaders[rows] < 0
            rows, bucket = rows[free], bucket[free]
            leads = np.ones(len(rows), bool)
            leads[1:] = bucket[1:] != bucket[:-1]
            # The leader of each row: the last lead at or before it.
            first = rows[np.flatnonzero(leads)[np.cumsum(leads) - 1]] if len(rows) else rows
            rows, bucket, first = rows[~leads], bucket[~leads], first[~leads]
            if not len(rows):
                return
            near = self.count_matches(first, rows) >= self.n_needed
            leaders[rows[near]] = first[near]


def find_buckets(keys: shingles.Hashes, more: shingles.Hashes | None = None) -> tuple[Rows, Rows]:
    """Return the rows whose keys occur more than once, and the first row of each one's bucket.

    A bucket's rows are adjacent and ascending. With ``more``, both keys must be equal.
    """
    # Sorting keys alone is fast; few of them occur twice and need a stable sort.
    order = np.argsort(keys)
    same = np.diff(keys[order]) == 0
    twice = np.zeros(len(keys), bool)
    # Both neighbors of an equal pair.
    twice[order[1:][same]] = True
    twice[order[:-1][same]] = True
    rows = np.flatnonzero(twice)
    # np.lexsort sorts by its last key first.
    columns = [keys[rows]] if more is None else [more[rows], keys[rows]]
    order = np.lexsort(columns)
    rows = rows[order]
    new = np.zeros(len(rows), bool)
    new[:1] = True
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    starts = np.flatnonzero(new)
    sizes = np.diff(starts, append=len(rows))
    shared = np.repeat(sizes > 1, sizes)
    return rows[shared], np.repeat(rows[starts], sizes)[shared]
