"""Order packed rows and make batches of them, in numpy and int32.

The rows of a step are a pure function of seed, epoch, step, world size and rank: with no sampler
state to save, a resumed run sees the same rows at every step. Labels, position ids and document
bounds are derived here and never stored.

Shapes: N rows in all, B rows of a batch or of several, L tokens a row, P batches.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.packing import IGNORE, count_targets
from expertflow.tokens.ragged import Ragged, offsets_of

# Rows of one document are cut to a multiple of this, to keep matrix products on fast paths.
MULTIPLE = 8
# Rows whose targets are counted at a time, to limit memory on large data sets.
COUNTED_ROWS = 1 << 16
# Cached views; making one takes longer than filling a short one.
MAX_VIEWS = 64
# A batch's [B, L] tensors on the device, and the bounds.
TENSORS = ("input_ids_BL", "position_ids_BL", "labels_BL", "cu_seqlens")
CPU = torch.device("cpu")
Ints = NDArray[np.integer]
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
        return np.concatenate((full.ravel(), rest))


def micro_batch_rows(chosen: Rows, micro_batch_size: int) -> Iterator[Rows]:
    for start in range(0, len(chosen), micro_batch_size):
        yield chosen[start : start + micro_batch_size]


class Batch(Record, frozen=True, kw_only=True):
    """One micro-batch on the host, in int32.

    ``labels_BL`` are unshifted: i is the target of i - 1. ``cu_seqlens`` are the bounds of all
    documents and paddings. Unless ``n_bounds`` is null, empty documents at the end fill them up to
    that number for the model.
    """

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    labels_BL: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    n_tokens: int
    n_target_tokens: int
    rows: tuple[int, ...]
    n_bounds: int | None = None

    @property
    def n_padding_tokens(self) -> int:
        return self.input_ids_BL.numel() - self.n_tokens

    def pin_memory(self) -> "Batch":
        return replace(self, **{name: getattr(self, name).pin_memory() for name in TENSORS})


class Buffers:
    """Reusable memory for some micro-batches, filled and released together.

    A GPU reads it later, so it is pinned, and an event after all copies marks their completion.
    """

    def __init__(
        self, n_rows: int, length: int, *, n_batches: int = 1, device: torch.device = CPU
    ) -> None:
        pinned = device.type == "cuda"
        self.copied = torch.cuda.Event(blocking=True) if pinned else None  # type: ignore[no-untyped-call]
        n = n_rows * length * n_batches
        # Every token may be its own document; each batch has one more bound than documents.
        sizes = (n, n, n, n + n_batches)
        self.all_tensors = [torch.empty(k, dtype=torch.int32, pin_memory=pinned) for k in sizes]
        self.ids, self.positions, self.labels, self.bounds = (t.numpy() for t in self.all_tensors)
        self._views: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def tensors(self, start: int, n_rows: int, length: int) -> list[torch.Tensor]:
        key = (start, n_rows, length)
        if key not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            end = start + n_rows * length
            # Not copies: the numpy arrays above fill the memory that these view.
            self._views[key] = [t[start:end].view(n_rows, length) for t in self.all_tensors[:3]]
        return self._views[key]


class Collator:
    """Makes micro-batches from packed rows; batch-independent counts are computed once.

    Padding is one more document at the end of its row, so shapes stay fixed; its labels are
    ignored, as are documents' first tokens. If all rows have one document each, padding beyond the
    longest of a batch is cut off. With ``evens_bounds``, all batches with equally many rows have
    equally many bounds.
    """

    def __init__(self, rows: PackedRows, *, evens_bounds: bool = False) -> None:
        self.rows = rows
        self.n_tokens_N = rows.seq_lengths.sum_lists()
        self.n_targets_N = targets_per_row(rows)
        self.cuts = len(rows.seq_lengths.values) == len(rows)
        # One padding per row, and the bound at 0.
        most = np.sort(np.diff(rows.seq_lengths.offsets) + 1)[::-1] if evens_bounds else ()
        self._most_bounds = (np.cumsum(most) + 1).tolist()

    def batch(self, chosen: Rows, buffers: Buffers | None = None) -> Batch:
        return self.batches([chosen], buffers)[0]

    # DataLoader calls this with a micro-batch's rows.
    __getitem__ = batch

    def batches(self, parts: Sequence[Rows], buffers: Buffers | None = None) -> list[Batch]:
        """Build one micro-batch per part, all together, since most of the cost is in calls.

        With ``buffers``, the result is valid until they are filled again.
        """
        if buffers is None:
            n_rows = max(map(len, parts))
            buffers = Buffers(n_rows, self.rows.length, n_batches=len(parts))
        chosen = np.concatenate(parts)
        n_tokens_B, n_targets_B = self.n_tokens_N[chosen], self.n_targets_N[chosen]
        n_rows_P = np.array([len(part) for part in parts])
        first_rows_P = offsets_of(n_rows_P)[:-1]
        lengths_P = self._lengths(n_tokens_B, first_rows_P)
        starts = offsets_of(n_rows_P * lengths_P).tolist()
        for part, length, start in zip(parts, lengths_P.tolist(), starts[:-1], strict=True):
            out = buffers.ids[start : start + len(part) * length].reshape(len(part), length)
            rows = self.rows
            if length < rows.length:
                cut = tuple(ids_NL[:, :length] for ids_NL in rows.parts_NL)
                rows = replace(rows, parts_NL=cut)
            rows.take_ids(part, out=out)
        bounds = self._derive(buffers, chosen, n_tokens_B, np.repeat(lengths_P, n_rows_P))
        at = np.searchsorted(bounds, starts).tolist()
        n_tokens = np.add.reduceat(n_tokens_B, first_rows_P).tolist()
        n_targets = np.add.reduceat(n_targets_B, first_rows_P).tolist()
        made = []
        for i, (part, length) in enumerate(zip(parts, lengths_P.tolist(), strict=True)):
            # Bounds count from 0 in every batch: one more than documents and paddings.
            first, last = at[i] + i, at[i + 1] + i + 1
            np.subtract(bounds[at[i] : at[i + 1] + 1], starts[i], out=buffers.bounds[first:last])
            ids_BL, positions_BL, labels_BL = buffers.tensors(starts[i], len(part), length)
            made.append(
                Batch(
                    input_ids_BL=ids_BL,
                    position_ids_BL=positions_BL,
                    labels_BL=labels_BL,
                    cu_seqlens=buffers.all_tensors[3][first:last],
                    max_length=length,
                    n_tokens=n_tokens[i],
                    n_target_tokens=n_targets[i],
                    rows=tuple(part.tolist()),
                    n_bounds=self._most_bounds[len(part) - 1] if self._most_bounds else None,
                )
            )
        return made

    def _lengths(self, n_tokens_B: Ints, first_rows_P: Ints) -> Ints:
        if not self.cuts:
            return np.full(len(first_rows_P), self.rows.length)
        longest_P: Ints = np.maximum.reduceat(n_tokens_B, first_rows_P)
        return np.minimum(-(-longest_P // MULTIPLE) * MULTIPLE, self.rows.length)

    def _derive(self, buffers: Buffers, chosen: Rows, n_tokens_B: Ints, length_B: Ints) -> Ints:
        lengths = _document_lengths(self.rows.seq_lengths, chosen, length_B - n_tokens_B)
        bounds = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        size, starts = int(bounds[-1]), bounds[:-1]
        np.subtract(
            _tables(size)[0][:size], np.repeat(starts, lengths), out=buffers.positions[:size]
        )
        cap = _label_cap(self.rows.spans, chosen, length_B)
        # The first token of a document would be predicted from the document before it.
        cap[starts] = IGNORE
        np.minimum(buffers.ids[:size], cap, out=buffers.labels[:size])
        return bounds


def targets_per_row(rows: PackedRows) -> NDArray[np.int64]:
    """Count the targets of every row, [N]: supervised tokens not first in a document."""
    counts = np.zeros(len(rows), np.int64)
    for start in range(0, len(rows), COUNTED_ROWS):
        part = np.arange(start, min(start + COUNTED_ROWS, len(rows)))
        counts[part] = count_targets(rows.seq_lengths.take(part), rows.spans.take(part))
    return counts


def _document_lengths(documents: Ragged, chosen: Rows, padding_B: NDArray[np.integer]) -> Ints:
    """Return the document lengths of some rows, each row's padding, if any, after them."""
    first = documents.offsets[chosen]
    n = documents.offsets[1:][chosen] - first + 1
    ends = np.cumsum(n)
    # One more place than a row has documents; its value belongs to the next row.
    lengths = documents.values.take(_places(first, n, ends), mode="clip")
    lengths[ends - 1] = padding_B
    # A full row has no padding, and an empty document would add a bound.
    return lengths[lengths > 0]


def _label_cap(spans: Ragged, chosen: Rows, length_B: Ints) -> Ints:
    """Return a cap that turns ids into labels by minimum: IGNORE, or more than any id."""
    first = spans.offsets[chosen]
    n = spans.offsets[1:][chosen] - first
    ends, row_ends = np.cumsum(n), np.cumsum(length_B)
    edges = np.empty(int(ends[-1]) + 2, np.int32)
    # Spans (2, 4) and (1, 3) in two rows of 5 -> [0, 2, 4, 6, 8, 10]: off, on, off, on, off.
    edges[0], edges[-1] = 0, row_ends[-1]
    inner = edges[1:-1]
    spans.values.take(_places(first, n, ends), mode="clip", out=inner)
    inner += np.repeat((row_ends - length_B).astype(np.int32), n)
    # Unsupervised and supervised spans alternate.
    n_runs = len(edges) - 1
    return np.repeat(_tables(n_runs)[1][:n_runs], edges[1:] - edges[:-1])


def _places(first: Ints, n: Ints, ends: Ints) -> Ints:
    """Return the indexes of runs: ``n`` from each ``first`` on; ``ends`` are the sums of ``n``."""
    places = np.repeat(first - ends + n, n)
    places += _tables(len(places))[0][: len(places)]
    return places


def _tables(n: int) -> tuple[Ints, Ints]:
    """Return at least ``n`` of 0, 1, 2, ... and of IGNORE and the highest number alternating."""
    # A power of two above n, so that a few cached tables serve every batch.
    return _tables_of_bits(n.bit_length())


@lru_cache
def _tables_of_bits(n_bits: int) -> tuple[Ints, Ints]:
    counting = np.arange(1 << n_bits, dtype=np.int32)
    turns = np.where(counting % 2 == 1, np.iinfo(np.int32).max, IGNORE).astype(np.int32)
    return counting, turns
