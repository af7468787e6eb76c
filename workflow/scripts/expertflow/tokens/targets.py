"""Count what the loss of a row is taken over."""

import numpy as np

from expertflow.tokens.ragged import Ints, Ragged, offsets_of

# The label of what is no target; cross-entropy in torch leaves it out.
IGNORE = -100


def count_targets(seq_lengths: Ragged, spans: Ragged) -> Ints:
    """Count by row the supervised tokens that have context: all but the first of each document."""
    n_rows = len(seq_lengths)
    row_starts = offsets_of(seq_lengths.sums())
    firsts = offsets_of(seq_lengths.values)[:-1]
    owner = np.repeat(np.arange(n_rows), spans.lengths // 2)
    low = spans.values[::2] + row_starts[owner]
    high = spans.values[1::2] + row_starts[owner]
    supervised = np.bincount(owner, weights=high - low, minlength=n_rows).astype(np.int64)
    span = np.searchsorted(low, firsts, side="right") - 1
    covered = np.zeros(len(firsts), bool)
    there = span >= 0
    covered[there] = firsts[there] < high[span[there]]
    rows = np.repeat(np.arange(n_rows), seq_lengths.lengths)
    return supervised - np.bincount(rows[covered], minlength=n_rows)
