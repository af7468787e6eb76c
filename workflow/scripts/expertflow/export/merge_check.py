"""Compare the trained model with the files that were written, on held-out rows."""

import math
from typing import Any

import numpy as np
import torch

from expertflow.core.errors import TrainingError
from expertflow.core.records import Record
from expertflow.tokens.arrow import PackedRows
from expertflow.train.model.packed import PackedLoss, causal_lm, held_out_loss

# Attention of the comparison: it takes plain text as well as packed rows.
ATTENTION = "sdpa"
# As much as both bounds allow, rows are compared.
MAX_ROWS = 32
MAX_TOKENS = 4_096
# Of so many documents the first tokens are asked for their logits, each by itself.
N_PROBES = 4
PROBE_TOKENS = 64
# Merging changes the order of fp32 sums and nothing else; more than this is a damaged merge.
MAX_LOSS_DIFFERENCE = 1e-3  # nats a target
MAX_LOGIT_DIFFERENCE = 1e-2  # of the largest logit
# Weights that are cast to 16 bits are off by up to 2^-9 of themselves, which moves each target's
# loss either way. Spread a target and largest logit difference, measured on trained models of 2 to
# 16 layers: docs/exporting.md. Both bounds are several times what was seen.
ROUNDING_SPREAD = 0.1  # nats, over the square root of the number of targets
ROUNDING_LOGIT_DIFFERENCE = 0.1  # of the largest logit
HALF_TYPES = ("bfloat16", "float16")


class Said(Record, frozen=True):
    """What a model says to the same rows; one tensor of logits [T, V] for each probe."""

    loss: float
    n_targets: int
    logits: tuple[torch.Tensor, ...]


class Comparison(Record, frozen=True, kw_only=True):
    """How far the written files are from the trained model, and how far they might have been.

    Losses are in nats a target; differences of logits are absolute.
    """

    loss_before: float
    loss_after: float
    n_rows: int
    n_targets: int
    allowed_loss_difference: float
    max_logit_difference: float
    allowed_logit_difference: float

    @property
    def holds(self) -> bool:
        """Tell whether both stay within their bounds; what is not a number does not."""
        moved = abs(self.loss_after - self.loss_before)
        return (
            moved <= self.allowed_loss_difference
            and self.max_logit_difference <= self.allowed_logit_difference
        )


def sample_rows(rows: PackedRows) -> PackedRows:
    """Take the first rows that hold something to predict, up to the bounds of the sample."""
    n = min(MAX_ROWS, max(1, MAX_TOKENS // rows.length))
    chosen = np.flatnonzero(rows.spans.lengths)[:n]
    return PackedRows(
        (rows.take_ids(chosen),), rows.seq_lengths.take(chosen), rows.spans.take(chosen)
    )


def probes(rows: PackedRows) -> list[torch.Tensor]:
    """Take the beginnings of documents, [1, T] each: first those that begin the rows."""
    ids_NL = rows.take_ids(np.arange(min(len(rows), N_PROBES)))
    places = []
    for i, ids in enumerate(ids_NL):
        lengths = [int(n) for n in rows.seq_lengths[i]][:N_PROBES]
        starts = np.cumsum([0, *lengths])
        for nth, n in enumerate(lengths):
            places.append((nth, i, ids[starts[nth] :][: min(n, PROBE_TOKENS)]))
    places.sort(key=lambda place: place[:2])
    return [torch.from_numpy(ids[None].astype(np.int64)) for _, _, ids in places[:N_PROBES]]


def ask(model: Any, rows: PackedRows) -> Said:
    """Take the loss on some rows, and logits of held-out tokens."""
    loss, n_targets = held_out_loss(PackedLoss(model).eval(), rows, micro_batch_size=1)
    lm = causal_lm(model)
    logits = tuple(model(input_ids=ids, use_cache=False).logits[0].float() for ids in probes(rows))
    config = lm.config.get_text_config()
    if not all(tensor.shape[-1] == config.vocab_size for tensor in logits):
        raise TrainingError(
            f"{lm.config.model_type}: its config says {config.vocab_size} tokens, its head has"
            f" {logits[0].shape[-1]}; correct vocab_size in the base model's config.json"
        )
    return Said(loss, n_targets, logits)


def compare(trained: Said, written: Said, *, n_rows: int, dtype: str) -> Comparison:
    """Hold what the files say against what the trained model says."""
    half = dtype in HALF_TYPES
    loss, logits = MAX_LOSS_DIFFERENCE, MAX_LOGIT_DIFFERENCE
    largest = max(float(said.abs().max()) for said in trained.logits)
    differences = [
        (now - then).abs().max() for then, now in zip(trained.logits, written.logits, strict=True)
    ]
    return Comparison(
        loss_before=trained.loss,
        loss_after=written.loss,
        n_rows=n_rows,
        n_targets=trained.n_targets,
        allowed_loss_difference=loss
        + (ROUNDING_SPREAD / math.sqrt(trained.n_targets) if half else 0.0),
        # torch's maximum keeps what is not a number, Python's may lose it.
        max_logit_difference=float(torch.stack(differences).max()),
        allowed_logit_difference=(ROUNDING_LOGIT_DIFFERENCE if half else logits)
        * max(1.0, largest),
    )


def check(expert: str, comparison: Comparison, *, checkpoint: str) -> None:
    """Let only files pass that say what the trained model says.

    Raises:
        TrainingError: loss or logits moved by more than rounding moves them.
    """
    if comparison.holds:
        return
    raise TrainingError(
        f"{expert}: merging moved the held-out loss from {comparison.loss_before:.6g} to"
        f" {comparison.loss_after:.6g} ({comparison.allowed_loss_difference:.2g} allowed) and the"
        f" logits by {comparison.max_logit_difference:.3g}"
        f" ({comparison.allowed_logit_difference:.2g} allowed); export.dtype fp32 rounds nothing,"
        f" and the adapter stays unmerged in {checkpoint}"
    )
