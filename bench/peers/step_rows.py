"""The rows of every step in our order, arranged so that another trainer sees the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows, read_rows


def rows_by_step(packed: Path, plan: TrainPlan, shift: int) -> Iterator[PackedRows]:
    """Return the rows of every step; ``shift`` starts at a later step."""
    from expertflow.train.feed.loader import make_feed

    rows = read_rows(packed)
    order = make_feed(plan, rows).order
    for step in range(plan.n_steps):
        chosen = order.rows_of_step((step + shift) % plan.n_steps)
        n_short = plan.global_batch_sequences - len(chosen)
        # A row without targets adds nothing to loss, gradient or the count of targets.
        ids = np.concatenate([rows.take_ids(chosen), np.zeros((n_short, rows.length), np.int32)])
        lengths = rows.seq_lengths.take(chosen).tolist() + [[rows.length]] * n_short
        spans = rows.spans.take(chosen).tolist() + [[]] * n_short
        yield PackedRows.from_lists(ids, lengths, spans)


def tokenizer(folder: Path) -> Path:
    """Save a tokenizer that has only special tokens; TRL needs one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    if not folder.exists():
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        made.save_pretrained(folder)
    return folder
