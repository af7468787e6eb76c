"""Bring rows with equal keys together, in flat memory however many rows there are."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from expertflow.data.words import Hashes

Rows = NDArray[np.int64]

# Rows sorted at once. Keys are hashes, so a range of keys holds its share of the rows.
PASS_ROWS = 1 << 20
SCAN_ROWS = 1 << 20


def buckets(keys: Hashes, more: Hashes | None = None) -> Iterator[tuple[Rows, Rows]]:
    """Yield the rows whose keys occur more than once, pass by pass: (rows, first row of bucket).

    Rows of one bucket stand together in rising order. With ``more`` both keys must be equal.
    """
    for every in _passes(keys):
        rows = every[_shared(keys[every])]
        columns = [keys[rows]] if more is None else [more[rows], keys[rows]]
        order = np.lexsort(columns)  # stable: rows of a bucket keep their order
        rows = rows[order]
        new = np.zeros(len(rows), bool)
        new[:1] = True
        for column in columns:
            ordered = column[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        starts = np.flatnonzero(new)
        sizes = np.diff(starts, append=len(rows))
        shared = np.repeat(sizes > 1, sizes)
        yield rows[shared], np.repeat(rows[starts], sizes)[shared]


def _shared(values: Hashes) -> NDArray[np.bool_]:
    """Tell which values occur more than once."""
    order = np.argsort(values)
    ordered = values[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(values), bool)
    shared[order[1:][same]] = True
    shared[order[:-1][same]] = True
    return shared


def _passes(keys: Hashes) -> Iterator[Rows]:
    """Yield the rows of one range of keys after another."""
    n_bits = (len(keys) // PASS_ROWS).bit_length()
    if n_bits == 0:
        yield np.arange(len(keys))
        return
    for part in range(1 << n_bits):
        found = []
        for start in range(0, len(keys), SCAN_ROWS):
            here = keys[start : start + SCAN_ROWS] >> np.uint64(64 - n_bits) == part
            found.append(np.flatnonzero(here) + start)
        yield np.concatenate(found)
