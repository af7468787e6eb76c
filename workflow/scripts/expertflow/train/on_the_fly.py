"""Feed a run with documents that are tokenised in its own time, where packed rows are missing."""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record
from expertflow.data.records import ShardRecord
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.on_the_fly import DocumentRows
from expertflow.train.batches import Batch, Collator
from expertflow.train.order import RowOrder, Rows, micro_batch_rows
from expertflow.train.records import ModelRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Where the documents of a run are: records of their shards, and the keep-list."""

    shards: tuple[Path, ...]
    keep: Path

    def rows(self, model: ModelRecord, *, held_out: bool, length: int) -> DocumentRows:
        """Give the documents of one split.

        Raises:
            TrainingError: there are none.
        """
        rows = DocumentRows(
            [read_record(ShardRecord, path) for path in self.shards],
            self.keep,
            held_out=held_out,
            tokenizer=Path(model.path),
            layout=model.layout,
            length=length,
        )
        if not len(rows):
            raise TrainingError(f"{self.keep}: keeps no documents; name the expert's own files")
        return rows


@dataclass(kw_only=True, slots=True)
class OnTheFlyFeed:
    """What a run reads when nothing is packed: each step's documents, tokenised as it begins."""

    documents: DocumentRows
    order: RowOrder
    micro_batch_size: int
    n_steps: int
    _tokenised: tuple[int, Collator] | None = field(default=None)

    def n_targets(self, step: int) -> int:
        """Count the targets of a step: what its loss is divided by."""
        return int(self._collator(step).n_targets_N.sum())

    def micro_batches(self, step: int) -> list[Rows]:
        """Give the rows of every micro-batch, counted within the step."""
        n_rows = len(self.order.rows_of_step(step))
        return list(micro_batch_rows(np.arange(n_rows), self.micro_batch_size))

    def batches_from(self, step: int) -> Generator[Batch, None, None]:
        """Make the micro-batches from a step on."""
        for number in range(step, self.n_steps):
            collator = self._collator(number)
            for rows in self.micro_batches(number):
                yield collator.batch(rows)

    def _collator(self, step: int) -> Collator:
        made = self._tokenised
        if made is None or made[0] != step:
            rows = self.documents.take(self.order.rows_of_step(step))
            self._tokenised = made = step, Collator(rows)
        return made[1]


def without_rows(
    plan: TrainPlan, model: ModelRecord, documents: Documents
) -> tuple[TrainPlan, OnTheFlyFeed, PackedRows]:
    """Give the plan for rows of one document each, the feed, and the held-out rows.

    The number of steps stays, so a step sees fewer tokens than the plan says.
    """
    length = plan.sequence_length_tokens
    train = documents.rows(model, held_out=False, length=length)
    held_out = documents.rows(model, held_out=True, length=length)
    per_epoch = -(-len(train) // plan.global_batch_sequences)
    order = RowOrder(n_rows=len(train), global_batch=plan.global_batch_sequences, seed=plan.seed)
    feed = OnTheFlyFeed(
        documents=train,
        order=order,
        micro_batch_size=plan.micro_batch_size,
        n_steps=plan.n_steps,
    )
    plan = replace(plan, n_steps_per_epoch=per_epoch, n_epochs=plan.n_steps / per_epoch)
    return plan, feed, held_out.take(np.arange(len(held_out)))
