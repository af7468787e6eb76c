"""Lists of different lengths laid end to end: tokens, document lengths and spans.

There is no Python object per list, so a list costs eight bytes besides its values.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from expertflow.core.records import Record

Ints = NDArray[np.int64]


class Ragged(Record, frozen=True):
    """Lists of int32: list ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: NDArray[np.int32]
    offsets: Ints

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]] = ()) -> "Ragged":
        # An empty array comes first, since numpy cannot concatenate nothing.
        arrays = [np.asarray(item, dtype=np.int32) for item in lists]
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return cls(np.concatenate([np.empty(0, np.int32), *arrays]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def sum_lists(self) -> Ints:
        # By a running sum: np.add.reduceat returns the next list's first value for an empty list.
        total = np.concatenate(([0], np.cumsum(self.values, dtype=np.int64)))
        return np.asarray(total[self.offsets[1:]] - total[self.offsets[:-1]])

    def take(self, which: NDArray[np.integer]) -> "Ragged":
        starts, lengths = self.offsets[which], self.offsets[which + 1] - self.offsets[which]
        return Ragged(self.values[run_indices(starts, lengths)], offsets_of(lengths))

    def tolist(self) -> list[list[int]]:
        return [self[i].tolist() for i in range(len(self))]


def concat_ragged(parts: Iterable[Ragged]) -> Ragged:
    parts = [Ragged.from_lists(), *parts]
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))


def offsets_of(lengths: NDArray[np.integer]) -> Ints:
    """Return the starts of lists of these lengths, and the end of the last."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def run_indices(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> Ints:
    """Return the indices start, start + 1 ... of all runs.

    >>> run_indices(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(lengths)
    # In the example: [5, 5, -2, -2, -2] + [0, 1, 2, 3, 4].
    places = np.repeat(starts - offsets[:-1], lengths)
    places += np.arange(offsets[-1])
    return np.asarray(places)
