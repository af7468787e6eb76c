"""The rows of every step: a pure function of (seed, epoch, step, world size, rank).

With no sampler state to save, a resumed run sees the same rows at every step.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

Rows = NDArray[np.integer]
# Global batches of rows sorted by length together.
MEGA_BATCHES = 50


class RowOrder(Struct, kw_only=True):
    """The rows of every step. With ``lengths_N``, rows of similar length share a step."""

    n_rows: int
    global_batch: int
    seed: int
    lengths_N: NDArray[np.integer] | None = None
    _made: dict[int, Rows] = field(default_factory=dict)

    def rows_of_step(self, step: int) -> Rows:
        """Return an optimizer step's rows over all ranks; an epoch's last step may have fewer."""
        epoch, index = divmod(step, -(-self.n_rows // self.global_batch))
        return self.rows_of_epoch(epoch)[index * self.global_batch :][: self.global_batch]

    def sha256_of_step(self, step: int) -> str:
        """Hash the rows of a step, to verify that a resumed run has the same order."""
        rows: Rows = self.rows_of_step(step).astype("<i8")
        return hashlib.sha256(rows.tobytes()).hexdigest()

    def rows_of_epoch(self, epoch: int) -> Rows:
        """Return all rows in the order of an epoch.

        Caches two epochs, as the loader may be one ahead of the trainer.
        """
        made = self._made.get(epoch)
        if made is None:
            # A generator per epoch: a resumed run need not draw the epochs before its own.
            rng = np.random.default_rng([self.seed, epoch])
            order: Rows = rng.permutation(self.n_rows)
            if self.lengths_N is not None:
                order = self._grouped(order, rng)
            # Trainer and loader may both run this; neither alters what the other reads.
            near = {k: v for k, v in self._made.items() if abs(k - epoch) == 1}
            self._made = {**near, epoch: order}
            made = order
        return made

    def _grouped(self, order: Rows, rng: np.random.Generator) -> Rows:
        """Sort by length within mega-batches, then shuffle the full global batches.

        Mega-batches make epochs differ; the shuffle makes step order independent of length.
        """
        assert self.lengths_N is not None
        mega_batch = np.arange(self.n_rows) // (self.global_batch * MEGA_BATCHES)
        # lexsort takes its last key first, and is stable: rows of one length stay shuffled.
        order = order[np.lexsort((-self.lengths_N[order], mega_batch))]
        n_full = self.n_rows // self.global_batch
        full, rest = np.split(order, [n_full * self.global_batch])
        full = full.reshape(n_full, self.global_batch)[rng.permutation(n_full)]
        return np.concatenate((full.reshape(-1), rest))


def micro_batch_rows(chosen: Rows, micro_batch_size: int) -> Iterator[Rows]:
    for start in range(0, len(chosen), micro_batch_size):
        yield chosen[start : start + micro_batch_size]
