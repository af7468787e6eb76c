"""Feed a run with documents tokenized during training, without packed rows."""

from pathlib import Path

import numpy as np
from msgspec import field
from msgspec.structs import replace

from expertflow.core.errors import TrainingError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import Record, fill_record, read_record
from expertflow.data.documents import read_keep
from expertflow.data.records import ShardRecord
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.tokenize import DocumentRows
from expertflow.train.feed.batches import Collator, RowOrder, Rows, targets_per_row
from expertflow.train.feed.loader import BaseFeed
from expertflow.train.records import ModelRecord


class Documents(Record, frozen=True, kw_only=True):
    shards: tuple[Path, ...]
    keep: Path

    @property
    def records(self) -> list[ShardRecord]:
        return [read_record(ShardRecord, path) for path in self.shards]

    @property
    def sha256(self) -> str:
        return sha256_json([[r.sha256 for r in self.records], sha256_file(self.keep)])

    def adapt_plan(self, plan: TrainPlan) -> TrainPlan:
        """Return the plan for rows of one document each; the number of steps stays the same."""
        own = {(record.source, record.shard) for record in self.records}
        n_rows = sum(
            int(rows.n_copies[~rows.held_out].sum())
            for key, rows in read_keep(self.keep).items()
            if key in own
        )
        per_epoch = max(1, -(-n_rows // plan.global_batch_sequences))
        n_epochs = plan.n_steps / per_epoch
        return replace(
            plan,
            n_steps_per_epoch=per_epoch,
            n_epochs=n_epochs,
            loader="workers",
            dataloader_num_workers=0,
            dataloader_prefetch_factor=0,
            dataloader_persistent_workers=False,
            # Rows vary in length and come in numerical order.
            torch_compile=False,
            group_by_length=False,
        )

    def rows(self, model: ModelRecord, *, held_out: bool, length: int) -> DocumentRows:
        rows = DocumentRows(
            self.records,
            self.keep,
            held_out=held_out,
            tokenizer=Path(model.path),
            layout=model.tokenizer.layout,
            length=length,
        )
        if not len(rows):
            raise TrainingError(f"{self.keep}: keeps no documents; pass the expert's own files")
        return rows


class OnTheFlyFeed(BaseFeed, kw_only=True):
    documents: DocumentRows
    _tokenized: tuple[int, Collator] | None = field(default=None)

    def step_rows(self, step: int) -> tuple[Collator, Rows]:
        made = self._tokenized
        if made is None or made[0] != step:
            rows = self.documents.take(self.order.rows_of_step(step))
            self._tokenized = made = step, Collator(rows)
        return made[1], np.arange(len(made[1].rows))


def read_on_the_fly(
    plan: TrainPlan, model: ModelRecord, documents: Documents
) -> tuple[OnTheFlyFeed, PackedRows]:
    length = plan.sequence_length_tokens
    train = documents.rows(model, held_out=False, length=length)
    held_out = documents.rows(model, held_out=True, length=length)
    rows = held_out.take(np.arange(len(held_out)))
    if not targets_per_row(rows).any():
        raise TrainingError(
            f"{documents.keep}: the held-out documents have no targets in their first"
            f" {length} tokens; raise training.max_seq_length"
        )
    order = RowOrder(n_rows=len(train), global_batch=plan.global_batch_sequences, seed=plan.seed)
    feed = fill_record(
        OnTheFlyFeed, plan, documents=train, order=order, micro_batch_size=plan.batch_size
    )
    return feed, rows
