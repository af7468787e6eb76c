"""The Arrow layout of the keep-list: which documents count, how often, and on which side.

It names documents by source, shard and row, and knows nothing of what they say.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.data.records import ShardRecord

KEEP = pa.schema(
    [
        ("source", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("held_out", pa.bool_()),
        ("n_copies", pa.int32()),
    ]
)


class Kept(Record, frozen=True):
    """What the keep-list says of one row."""

    held_out: bool
    n_copies: int = 1


def read_keep(path: Path, shard: ShardRecord) -> dict[int, Kept]:
    """Map the kept rows of one shard to what the keep-list says of them."""
    kept: dict[int, Kept] = {}
    for part in iter_keep(path):
        if (part.source, part.shard) == (shard.source, shard.shard):
            columns = (part.rows.tolist(), part.held_out.tolist(), part.n_copies.tolist())
            kept.update((row, Kept(*rest)) for row, *rest in zip(*columns, strict=True))
    return kept


class KeptRows(NamedTuple):
    """Some kept rows of one shard, in their order."""

    source: str
    shard: str
    rows: NDArray[np.int32]
    held_out: NDArray[np.bool_]
    n_copies: NDArray[np.int32]


def iter_keep(path: Path) -> Iterator[KeptRows]:
    """Yield the keep-list in the order of the manifest; a batch of it is of one shard."""
    with pa.memory_map(str(path)) as source:
        for batch in pa.ipc.open_stream(source):
            if batch.num_rows:
                yield KeptRows(
                    batch["source"][0].as_py(),
                    batch["shard"][0].as_py(),
                    batch["row"].to_numpy(),
                    batch["held_out"].to_numpy(zero_copy_only=False),
                    batch["n_copies"].to_numpy(),
                )


def keep_by_shard(path: Path) -> dict[tuple[str, str], KeptRows]:
    """Read the keep-list by source and shard."""
    parts: dict[tuple[str, str], list[KeptRows]] = {}
    for rows in iter_keep(path):
        parts.setdefault((rows.source, rows.shard), []).append(rows)
    return {key: joined_rows(*key, rows) for key, rows in parts.items()}


def joined_rows(source: str, shard: str, parts: Sequence[KeptRows]) -> KeptRows:
    """Put some kept rows together."""
    columns = list(zip(*parts, strict=True))[2:]
    return KeptRows(source, shard, *map(np.concatenate, columns))
