"""Tokenize documents when a step asks for them: what training from packed rows replaces.

It is there for a trainer that is run by hand where the packed rows are missing, and to compare
others with. Every document has its own row, cut at the row length.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expertflow.data.documents import KeptRows, iter_texts, keep_by_shard
from expertflow.data.records import Layout, ShardRecord
from expertflow.data.render import Renderer
from expertflow.tokens.arrow import PAD_ID, PackedRows
from expertflow.tokens.engine import Engine
from expertflow.tokens.packing import clip_spans
from expertflow.tokens.ragged import Ragged, offsets_of, ragged, runs
from expertflow.tokens.tokenize import Drafter


class DocumentRows:
    """The kept documents of one split in the order of the manifest, as texts in memory."""

    def __init__(
        self,
        shards: Sequence[ShardRecord],
        keep: Path,
        *,
        held_out: bool,
        tokenizer: Path,
        layout: Layout,
        length: int,
    ) -> None:
        kept = keep_by_shard(keep)
        parts = [
            part
            for shard in shards
            if (rows := kept.get((shard.source, shard.shard))) is not None
            for part in _taken(Path(shard.path), rows, held_out)
        ]
        self._table = pa.Table.from_batches(parts) if parts else None
        self._drafter = Drafter(Renderer(layout))
        self._engine = Engine(tokenizer)
        self.length = length

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    def take(self, chosen: NDArray[np.integer]) -> PackedRows:
        if self._table is None or not len(chosen):
            return PackedRows((np.empty((0, self.length), np.int32),), ragged(), ragged())
        (part,) = self._table.take(pa.array(chosen)).combine_chunks().to_batches()
        drafted = self._drafter.draft(part)
        encoded = self._engine.encode_flat(drafted.draft.to_encode())
        tokens = drafted.tokens(encoded, self._engine)
        lengths = np.minimum(tokens.ids.lengths, self.length)
        ids_NL = np.full((len(chosen), self.length), PAD_ID, np.int32)
        places = runs(np.arange(len(chosen)) * self.length, lengths)
        ids_NL.reshape(-1)[places] = tokens.ids.values[runs(tokens.ids.offsets[:-1], lengths)]
        starts = np.zeros(len(chosen), np.int64)
        return PackedRows(
            (ids_NL,),
            Ragged(lengths[lengths > 0].astype(np.int32), offsets_of(np.sign(lengths))),
            clip_spans(tokens.spans, starts, lengths, starts),
        )


def _taken(documents: Path, kept: KeptRows, held_out: bool) -> list[pa.RecordBatch]:
    side = kept.held_out == held_out
    rows = np.repeat(kept.rows[side], kept.n_copies[side])
    taken = []
    first = 0
    for batch in iter_texts(documents):
        here = rows[(rows >= first) & (rows < first + batch.num_rows)] - first
        if len(here):
            taken.append(batch.take(pa.array(here)))
        first += batch.num_rows
    return taken
