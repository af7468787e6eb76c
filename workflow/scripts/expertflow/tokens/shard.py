"""Tokenize all documents of a token shard, once.

A token shard is several document shards of a source, since loading a large vocabulary takes as long
as tokenizing a hundred megabytes.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from itertools import chain, islice, pairwise, starmap
from pathlib import Path

import numpy as np
import pyarrow as pa
from msgspec.structs import asdict

from expertflow.core.errors import DataError
from expertflow.core.files import remove, sha256_json
from expertflow.core.progress import Progress
from expertflow.core.records import read_record, to_json, write_record
from expertflow.data.documents import iter_batches
from expertflow.data.records import ShardRecord
from expertflow.data.render import Renderer, training_texts
from expertflow.data.shapes import body_of
from expertflow.tokens.arrow import IDS_DTYPE, INDEX, index_batch
from expertflow.tokens.engine import Chosen, Encoder, choose_engine
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import (
    TOKENIZER_FILES,
    DecodedPiece,
    DecodedSample,
    StoredTokens,
    TokenizerRecord,
    TokenShardRecord,
    TokenSpec,
)
from expertflow.tokens.store import ensure_stored, publish
from expertflow.tokens.tokenize import Drafted, Drafter, TokenBatch

log = logging.getLogger(__name__)
IDS, INDEX_FILE, RECORD = "tokens.ids", "index.arrow", "record.json"
N_SAMPLES = 8
SAMPLE_TOKENS = 400
# Batches laid out while the engine loads, which takes a second.
N_AHEAD = 2
PROBE_DOCUMENTS = 100
PROBE_CHARS = 100_000


def pretokenize_shard(
    *,
    name: str,
    spec: TokenSpec,
    code: str,
    shards: Sequence[ShardRecord],
    tokenizer: TokenizerRecord,
    store: Path,
    ids: Path,
    index: Path,
) -> TokenShardRecord:
    """Write some shards' ids and supervised spans, or take them from the store."""
    made_from = [
        [shard.sha256 for shard in shards],
        tokenizer.sha256,
        to_json(tokenizer.layout),
        to_json(spec),
        {name: _version(name) for name in ("fastokens", "tokenizers", "jinja2")},
        code,
    ]

    def make(folder: Path) -> None:
        stored = _tokenize_shards(name, spec, shards, tokenizer, folder)
        write_record(folder / RECORD, stored)

    def ensure() -> tuple[Path, bool, StoredTokens]:
        folder, was_there = ensure_stored(store, key, make)
        return folder, was_there, read_record(StoredTokens, folder / RECORD)

    key = sha256_json(made_from)
    folder, was_there, stored = ensure()
    if (folder / IDS).stat().st_size != stored.n_tokens * IDS_DTYPE.itemsize:
        log.warning("%s is damaged; its tokens are made again", folder)
        remove(folder)
        folder, was_there, stored = ensure()
    publish(folder / IDS, ids)
    publish(folder / INDEX_FILE, index)
    if was_there:
        log.info("taken from the store: %s tokens", f"{stored.n_tokens:,}")
    return TokenShardRecord(
        **asdict(stored),
        key=key,
        source=shards[0].source,
        shard=name,
        document_shards=tuple(shard.shard for shard in shards),
        n_documents_by_shard=tuple(shard.n_documents for shard in shards),
        path=str(ids),
        index_path=str(index),
    )


def _tokenize_shards(
    name: str,
    spec: TokenSpec,
    shards: Sequence[ShardRecord],
    tokenizer: TokenizerRecord,
    folder: Path,
) -> StoredTokens:
    renderer = Renderer(tokenizer.layout)
    drafter = Drafter(renderer)
    documents = [Path(shard.path) for shard in shards]
    drafts = (drafter.draft(part) for part in chain.from_iterable(map(iter_batches, documents)))
    n_documents = sum(shard.n_documents for shard in shards)
    progress = Progress(f"{shards[0].source}/{name}", total=n_documents, unit="documents tokenized")
    sample = [text for path in documents for text in _probe_texts(path, renderer, len(documents))]
    n_tokens = 0
    samples: list[tuple[int, DecodedSample]] = []
    with (
        ThreadPoolExecutor(1) as pool,
        (folder / IDS).open("wb") as ids,
        pa.OSFile(str(folder / INDEX_FILE), "wb") as sink,
        pa.ipc.new_stream(sink, INDEX) as writer,
    ):
        choosing = pool.submit(
            choose_engine, Path(tokenizer.path), wanted=spec.engine, sample=sample
        )
        for drafted, tokens in _encoded(drafts, pool, choosing):
            ids.write(np.ascontiguousarray(tokens.ids.values, IDS_DTYPE).data)
            lengths = tokens.ids.lengths
            writer.write_batch(
                index_batch(lengths, tokens.spans, drafted.special_text, drafted.dropped)
            )
            written = [row for row, reason in enumerate(drafted.dropped) if reason is None]
            for row in written[: N_SAMPLES - len(samples)]:
                decoded = _decoded_sample(drafted, tokens, row, choosing.result().engine)
                samples.append((progress.n_done + row, decoded))
            n_tokens += int(lengths.sum())
            progress.add(drafted.n_documents)
        engine, reason = choosing.result()
    if engine.sha256 != tokenizer.sha256:
        raise DataError(
            f"{tokenizer.path}: its {TOKENIZER_FILES[0]} is not what its record says; delete"
            f" {tokenizer.path}.json and run again"
        )
    log.info("engine %s %s: %s", engine.name, engine.version, reason)
    log.info("%d documents, %d tokens in %.3f s", progress.n_done, n_tokens, progress.elapsed_s)
    return StoredTokens(
        n_documents=progress.n_done,
        n_tokens=n_tokens,
        n_dropped=drafter.n_dropped,
        dropped_examples=tuple(drafter.dropped_examples),
        samples=tuple(samples),
        engine=engine.name,
        engine_version=engine.version,
        engine_reason=reason,
        tokenizer_sha256=engine.sha256,
    )


def _encoded(
    drafts: Iterator[Drafted], pool: ThreadPoolExecutor, choosing: Future[Chosen]
) -> Iterator[tuple[Drafted, TokenBatch]]:
    def encode(drafted: Drafted) -> Ragged:
        return drafted.encode(choosing.result().engine)

    def finish(drafted: Drafted, ids: Future[Ragged]) -> tuple[Drafted, TokenBatch]:
        return drafted, drafted.tokens(ids.result(), choosing.result().engine)

    waiting: deque[tuple[Drafted, Future[Ragged]]] = deque()
    for drafted in drafts:
        waiting.append((drafted, pool.submit(encode, drafted)))
        if len(waiting) > N_AHEAD:
            yield finish(*waiting.popleft())
    yield from starmap(finish, waiting)


def _version(package: str) -> str | None:
    # The version where the job runs, which may not be where Snakemake runs.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _probe_texts(documents: Path, renderer: Renderer, n_shards: int) -> list[str]:
    texts: list[str] = []
    left = PROBE_CHARS // n_shards
    for first in islice(iter_batches(documents), 1):
        part = first.slice(0, -(-PROBE_DOCUMENTS // n_shards))
        bodies = map(body_of, part["frame"].to_pylist(), part["texts"].to_pylist())
        for text in training_texts(renderer, bodies):
            if left > 0:
                texts.append(text[:left])
                left -= len(texts[-1])
    return texts


def _decoded_sample(
    drafted: Drafted, tokens: TokenBatch, row: int, engine: Encoder
) -> DecodedSample:
    ids, learned = tokens.ids[row], tokens.spans[row].tolist()
    n = min(len(ids), SAMPLE_TOKENS)
    edges = [0, *(at for at in learned if at < n), n]
    pairs = list(zip(learned[::2], learned[1::2], strict=True))
    pieces = [
        DecodedPiece(
            text=engine.decode(ids[start:end].tolist()),
            learned=any(low <= start < high for low, high in pairs),
        )
        for start, end in pairwise(edges)
        if start < end
    ]
    return DecodedSample(
        document_id=drafted.document_ids[row].as_py(),
        n_tokens=len(ids),
        n_supervised_tokens=sum(high - low for low, high in pairs),
        pieces=tuple(pieces),
    )
