"""Tokenize all documents of a token shard, once.

A token shard is several document shards of a source, since loading a large vocabulary takes as long
as tokenizing a hundred megabytes.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from msgspec.structs import asdict

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json, sha256_json
from expertflow.core.progress import ProgressCounter, show_activity
from expertflow.core.records import read_record, to_json, write_record
from expertflow.core.sidecars import check_inputs, write_sidecar
from expertflow.data.documents import iter_batches
from expertflow.data.records import ShardRecord
from expertflow.data.render import Renderer, iter_training_texts
from expertflow.data.shapes import body_of
from expertflow.tokens import records
from expertflow.tokens.arrow import IDS_DTYPE, INDEX, index_batch
from expertflow.tokens.engine import Engine, choose_engine
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.store import ensure_stored, publish_file
from expertflow.tokens.tokenize import N_EXAMPLES, BatchDraft, Drafter, TokenBatch

log = logging.getLogger(__name__)
IDS, INDEX_FILE, RECORD = "tokens.ids", "index.arrow", "record.json"
# More than the report shows, since some turn out to be held-out or duplicates.
N_SAMPLES = 8
SAMPLE_TOKENS = 400
# Batches laid out while the engine loads, which takes a second.
N_AHEAD = 2
PROBE_DOCUMENTS = 100
PROBE_CHARS = 100_000


def pretokenize_shard(
    *,
    name: str,
    spec: records.TokenSpec,
    code: str,
    shards: Sequence[ShardRecord],
    tokenizer: records.TokenizerRecord,
    store: Path,
    ids: Path,
    index: Path,
) -> records.TokenShardRecord:
    """Write some shards' ids and supervised spans, or take them from the store."""
    # Other versions may encode a text or lay out a chat differently: those where the job runs,
    # which may not be where Snakemake runs.
    packages = ("fastokens", "tokenizers", "jinja2")
    key = sha256_json(
        [
            [shard.sha256 for shard in shards],
            tokenizer.sha256,
            to_json(tokenizer.layout),
            to_json(spec),
            {name: metadata.version(name) for name in packages},
            code,
        ]
    )

    def make(folder: Path) -> None:
        write_record(folder / RECORD, _tokenize_shards(name, spec, shards, tokenizer, folder))
        files = [folder / IDS, folder / INDEX_FILE]
        write_sidecar(folder / RECORD, spec=canonical_json(to_json(spec)), code=code, files=files)

    def is_complete(folder: Path) -> bool:
        try:
            found = check_inputs([folder / RECORD])
        except DataError as error:
            log.warning("%s", error)
            return False
        # check_inputs does not report a missing file: it is just not among those checked.
        return {folder / name for name in (RECORD, IDS, INDEX_FILE)} == found.keys()

    folder, existed = ensure_stored(store, key, make, is_complete)
    stored = read_record(records.StoredTokens, folder / RECORD)
    publish_file(folder / IDS, ids)
    publish_file(folder / INDEX_FILE, index)
    if existed:
        log.info("taken from the store: %s tokens", f"{stored.n_tokens:,}")
    return records.TokenShardRecord(
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
    spec: records.TokenSpec,
    shards: Sequence[ShardRecord],
    tokenizer: records.TokenizerRecord,
    folder: Path,
) -> records.StoredTokens:
    renderer = Renderer(tokenizer.layout)
    documents = [Path(shard.path) for shard in shards]
    parts = chain.from_iterable(map(iter_batches, documents))
    total, source = sum(shard.n_documents for shard in shards), shards[0].source
    progress = ProgressCounter(f"{source}/{name}", total=total, unit="documents tokenized")
    sample = [text for path in documents for text in _probe_texts(path, renderer, len(documents))]
    n_tokens = n_dropped = 0
    examples: list[str] = []
    samples: list[tuple[int, records.DecodedSample]] = []
    with (
        show_activity(progress.describe),
        ThreadPoolExecutor(1) as pool,
        (folder / IDS).open("wb") as ids,
        pa.OSFile(str(folder / INDEX_FILE), "wb") as sink,
        pa.ipc.new_stream(sink, INDEX) as writer,
    ):
        choosing = pool.submit(
            choose_engine, Path(tokenizer.path), wanted=spec.engine, sample=sample
        )
        for draft, encoded in _encode(map(Drafter(renderer).draft_batch, parts), pool, choosing):
            tokens = draft.assemble_tokens(encoded, choosing.result())
            ids.write(np.ascontiguousarray(tokens.ids.values, IDS_DTYPE).data)
            lengths = tokens.ids.lengths
            writer.write_batch(
                index_batch(lengths, tokens.spans, draft.special_text, draft.dropped)
            )
            written = [row for row, reason in enumerate(draft.dropped) if reason is None]
            for row in written[: N_SAMPLES - len(samples)]:
                # Row numbers are relative to the token shard, not to this batch.
                decoded = _decode_sample(draft, tokens, row, choosing.result())
                samples.append((progress.n_done + row, decoded))
            n_tokens += int(lengths.sum())
            n_dropped += draft.n_documents - len(written)
            examples += draft.examples
            progress.add(draft.n_documents)
        engine = choosing.result()
    log.info("engine %s %s: %s", engine.name, engine.version, engine.reason)
    log.info("%d documents, %d tokens in %.3f s", progress.n_done, n_tokens, progress.elapsed_s)
    return records.StoredTokens(
        n_documents=progress.n_done,
        n_tokens=n_tokens,
        n_dropped=n_dropped,
        dropped_examples=tuple(examples[:N_EXAMPLES]),
        samples=tuple(samples),
        engine=engine.name,
        engine_version=engine.version,
        engine_reason=engine.reason,
        tokenizer_sha256=tokenizer.sha256,
    )


def _encode(
    drafts: Iterator[BatchDraft], pool: ThreadPoolExecutor, choosing: Future[Engine]
) -> Iterator[tuple[BatchDraft, Ragged]]:
    """Encode in the pool's one thread, after the choice, a few batches ahead of the consumer."""

    def encode(draft: BatchDraft) -> Ragged:
        return draft.encode_texts(choosing.result())

    waiting: deque[tuple[BatchDraft, Future[Ragged]]] = deque()
    for draft in drafts:
        waiting.append((draft, pool.submit(encode, draft)))
        if len(waiting) > N_AHEAD:
            first, encoding = waiting.popleft()
            yield first, encoding.result()
    for first, encoding in waiting:
        yield first, encoding.result()


def _probe_texts(documents: Path, renderer: Renderer, n_shards: int) -> list[str]:
    texts: list[str] = []
    left = PROBE_CHARS // n_shards
    for first in islice(iter_batches(documents), 1):
        # Rounded up, so that each of many shards contributes a document.
        part = first.slice(0, -(-PROBE_DOCUMENTS // n_shards))
        bodies = map(body_of, part["frame"].to_pylist(), part["texts"].to_pylist())
        for text in iter_training_texts(renderer, bodies):
            if left > 0:
                texts.append(text[:left])
                left -= len(texts[-1])
    return texts


def _decode_sample(
    draft: BatchDraft, tokens: TokenBatch, row: int, engine: Engine
) -> records.DecodedSample:
    assert draft.document_ids is not None
    ids, learned = tokens.ids[row], tokens.spans[row].tolist()
    n = min(len(ids), SAMPLE_TOKENS)
    # Learned and other pieces alternate.
    # Learned [3, 9) of 12 ids -> [0, 3, 9, 12]: every other piece is learned.
    edges = [0, *(min(at, n) for at in learned), n]
    pieces = [
        records.DecodedPiece(text=engine.decode(ids[start:end].tolist()), learned=bool(i % 2))
        for i, (start, end) in enumerate(pairwise(edges))
        if start < end
    ]
    return records.DecodedSample(
        document_id=draft.document_ids[row].as_py(),
        n_tokens=len(ids),
        n_supervised_tokens=sum(learned[1::2]) - sum(learned[::2]),
        pieces=tuple(pieces),
    )
