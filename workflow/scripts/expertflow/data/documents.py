"""Read documents back: whole shards, or only what the keep-list keeps."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from expertflow.data.records import Segment, ShardRecord
from expertflow.data.render import segments_from_rows

BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A rendered document with its side of the split."""

    document_id: str
    text_hash: str
    segments: tuple[Segment, ...]
    fields: dict[str, Any]
    held_out: bool
    row: int


def read_keep(path: Path, shard: ShardRecord) -> dict[int, bool]:
    """Map the kept rows of one shard to whether they are held out."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    here = (pc.field("source") == shard.source) & (pc.field("shard") == shard.shard)
    table = table.filter(here)
    return dict(zip(table["row"].to_pylist(), table["held_out"].to_pylist(), strict=True))


def iter_documents(shard: ShardRecord, keep: dict[int, bool]) -> Iterator[Document]:
    """Yield the kept documents of a shard in their order."""
    row = 0
    with pa.memory_map(shard.path) as source:
        for batch in pa.ipc.open_stream(source):
            for value in batch.to_pylist():
                if row in keep:
                    yield Document(
                        document_id=value["document_id"],
                        text_hash=value["text_hash"],
                        segments=segments_from_rows(value["segments"]),
                        fields=json.loads(value["fields"]),
                        held_out=keep[row],
                        row=row,
                    )
                row += 1


def iter_kept(shards: list[ShardRecord], keep: Path) -> Iterator[Document]:
    """Yield the kept documents of all shards, in the order of the manifest."""
    for shard in shards:
        yield from iter_documents(shard, read_keep(keep, shard))
