"""Stages that run in one process, on made-up documents of any number: time and peak memory.

The library's own functions do the work. Hashes are random, since what is decided by them alone does
not depend on texts; documents are ``TOKENS`` tokens long on average, so that ten million of them
fit on a disk: memory goes by documents and not by tokens.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scale_apart import Took, apart

from expertflow.core.files import remove
from expertflow.data.deduplicate import deduplicate_documents
from expertflow.data.documents import documents_schema
from expertflow.data.keep_list import KEEP
from expertflow.data.records import ShardRecord
from expertflow.data.settings import DeduplicateSpec
from expertflow.tokens.arrow import INDEX, index_batch, read_rows
from expertflow.tokens.pack import pack_sequences
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import PackingSpec, TokenShardRecord
from expertflow.train.feed.order import RowOrder

SHARD_DOCUMENTS, BATCH = 500_000, 50_000
REPEATED_FRACTION = 0.01
TOKENS, ROW_LENGTH = 12, 72
Row = dict[str, Any]

DEDUPLICATE = DeduplicateSpec(
    eval_fraction=0.02, max_documents=None, seed=0, max_rejected_fraction=0.01, near=None,
    weights={}, max_per_source={}, max_per_category=None, category_caps={},
)  # fmt: skip


def grow(name: str, sizes: list[int], folder: Path, make: Callable[[Path, int], Any]) -> list[Row]:
    """Measure one stage at some numbers of documents; what it reads is removed after each."""
    rows = []
    for n in sizes:
        place = folder / f"{name}-{n}"
        place.mkdir(parents=True)
        took: Took = apart(make(place, n))
        remove(place)
        row = {
            "n_documents": n, "seconds": took.seconds, "cpu_s": took.cpu_s,
            "peak_bytes": took.peak_bytes, **took.value,
        }  # fmt: skip
        rows.append(row)
        print(
            f"  {name:12} {n:>12,} documents {took.seconds:8.2f} s, {took.cpu_s:7.2f} CPU s"
            f" {took.peak_bytes / 1e6:8.0f} MB",
            flush=True,
        )
    return rows


def deduplication(folder: Path, n: int) -> Callable[[], Row]:
    """Write shards of documents that are hashes and nothing else; give the stage over them."""
    rng = np.random.default_rng(0)
    repeated = rng.integers(0, 1 << 64, (max(1, int(n * REPEATED_FRACTION)), 2), np.uint64)
    shards = []
    for number, start in enumerate(range(0, n, SHARD_DOCUMENTS)):
        count = min(SHARD_DOCUMENTS, n - start)
        path = folder / f"{number:03d}.arrow"
        schema = documents_schema(None)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for first in range(0, count, BATCH):
                writer.write_batch(_hashes(rng, repeated, min(BATCH, count - first), schema))
        shards.append(_shard_record(path, count))

    def work() -> Row:
        done = deduplicate_documents(
            expert="scale", spec=DEDUPLICATE, shards=shards, keep=folder / "keep.arrow"
        )
        return {"n_kept": done.n_documents, "keep_bytes": (folder / "keep.arrow").stat().st_size}

    return work


def _hashes(rng: Any, repeated: Any, n: int, schema: pa.Schema) -> pa.RecordBatch:
    hashes = rng.integers(0, 1 << 64, (n, 2), np.uint64)
    again = rng.random(n) < REPEATED_FRACTION
    hashes[again] = repeated[rng.integers(0, len(repeated), int(again.sum()))]
    binary = pa.Array.from_buffers(schema.field("text_hash").type, n, [None, pa.py_buffer(hashes)])
    nothing = pa.array([b""] * n, pa.binary())
    columns = {
        "document_id": pa.array([""] * n), "text_hash": binary,
        "group_hash": pa.array(hashes[:, 0].copy()), "category": pa.nulls(n, pa.string()),
        "frame": nothing, "texts": pa.array([[]] * n, pa.list_(pa.string())), "fields": nothing,
    }  # fmt: skip
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _shard_record(path: Path, n: int) -> ShardRecord:
    return ShardRecord(
        source="s", shard=path.stem, path=str(path), sha256="", n_records=n, n_documents=n,
        n_bytes=0, n_rejected_by_reason={}, n_filtered_by_reason={}, rejected_examples=(),
    )  # fmt: skip


def packing(folder: Path, n: int) -> Callable[[], Row]:
    """Write token shards of short documents; give the stage over them."""
    shards = _token_shards(folder, n)
    spec = PackingSpec(
        sequence_length_tokens=ROW_LENGTH, packing="bfd", overflow="split", seed=0,
        max_rejected_fraction=0.01,
    )  # fmt: skip
    keep = folder / "keep.arrow"

    def work() -> Row:
        record = pack_sequences(
            expert="scale", spec=spec, shards=shards, keep=keep, output=folder / "packed"
        )
        return {"n_tokens": record.train.n_tokens, "n_rows": record.train.n_sequences}

    return work


def opening(folder: Path, n: int) -> Callable[[], Row]:
    """Pack documents; give what every training process does with the rows before its first step."""
    apart(packing(folder, n))
    # Imported here, so that its own memory is not counted.
    from expertflow.train.feed.batches import Collator

    def work() -> Row:
        collator = Collator(read_rows(folder / "packed" / "train"))
        order = RowOrder(n_rows=len(collator.rows), global_batch=512, seed=0)
        order.rows_of_epoch(0)
        return {"n_rows": len(collator.rows)}

    return work


def _token_shards(folder: Path, n: int) -> list[TokenShardRecord]:
    rng = np.random.default_rng(0)
    shards = []
    with (
        pa.OSFile(str(folder / "keep.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, KEEP) as keep,
    ):
        for number, start in enumerate(range(0, n, SHARD_DOCUMENTS)):
            count = min(SHARD_DOCUMENTS, n - start)
            name = f"{number:03d}"
            lengths = rng.integers(2, 2 * TOKENS - 1, count).astype(np.int32)
            ids = rng.integers(0, 1000, int(lengths.sum()), dtype=np.int32)
            (folder / f"{name}.ids").write_bytes(ids.astype("<i4").data)
            _write_index(folder / f"{name}.arrow", lengths)
            for first in range(0, count, 1 << 16):
                m = min(1 << 16, count - first)
                columns = [
                    pa.array(["s"] * m), pa.array([name] * m),
                    pa.array(np.arange(first, first + m, dtype=np.int32)),
                    pa.array(np.arange(m) % 50 == 0), pa.array(np.ones(m, np.int32)),
                ]  # fmt: skip
                keep.write_batch(pa.RecordBatch.from_arrays(columns, schema=KEEP))
            shards.append(_token_record(folder, name, count, len(ids)))
    return shards


def _write_index(path: Path, lengths: Any) -> None:
    """Write the index; of each document the second half is supervised."""
    spans = np.stack((lengths // 2, lengths), axis=1).reshape(-1).astype(np.int32)
    n = len(lengths)
    whole = Ragged(spans, np.arange(n + 1, dtype=np.int64) * 2)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, INDEX) as writer:
        writer.write_batch(index_batch(lengths, whole, np.zeros(n, bool), [None] * n))


def _token_record(folder: Path, name: str, n: int, n_tokens: int) -> TokenShardRecord:
    return TokenShardRecord(
        source="s", shard=name, document_shards=(name,), n_documents_by_shard=(n,),
        path=str(folder / f"{name}.ids"), index_path=str(folder / f"{name}.arrow"), key="",
        n_documents=n, n_tokens=n_tokens, n_dropped=0, dropped_examples=(), samples=(),
        engine="tokenizers", engine_version="0", engine_reason="made up", tokenizer_sha256="",
    )  # fmt: skip


STAGES: dict[str, Callable[[Path, int], Callable[[], Row]]] = {
    "deduplicate": deduplication,
    "pack": packing,
    "open_rows": opening,
}


def planning(sizes: list[int], repeats: int) -> list[Row]:
    """Plan rows of 2048 tokens for so many documents, as ``bench/plan_rows.py`` does."""
    from plan_rows import MEDIAN_TOKENS, SPREAD, measure

    def work(n: int) -> Row:
        drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SPREAD, n)
        lengths = np.clip(drawn, 1, 40_000).astype(np.int32)
        return measure(lengths, 2048, repeats)

    rows = []
    for n in sizes:
        took = apart(partial(work, n))
        rows.append({**took.value, "peak_bytes": took.peak_bytes})
        print(f"  {'plan rows':12} {n:>12,} documents {rows[-1]['plan_s']:8.2f} s", flush=True)
    return rows
