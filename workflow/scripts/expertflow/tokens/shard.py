"""Tokenise the kept documents of one shard into an Arrow file."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from expertflow.core.files import replacing, sha256_file
from expertflow.data.documents import Document, iter_documents, read_keep
from expertflow.data.records import ShardRecord
from expertflow.tokens.arrow import TOKENS
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import TokenShardRecord
from expertflow.tokens.tokenise import TokenisedDocument, tokenise

BATCH_DOCUMENTS = 1000


def pretokenize_shard(
    *, shard: ShardRecord, keep: Path, tokenizer: Path, output: Path
) -> TokenShardRecord:
    """Write ids and supervised spans of a shard's kept documents, in their order."""
    engine = Engine(tokenizer)
    n_documents = n_tokens = n_supervised = 0
    kept = iter_documents(shard, read_keep(keep, shard))
    with (
        replacing(output) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_stream(sink, TOKENS) as writer,
    ):
        for batch in _batches(kept):
            tokenised = tokenise([d.segments for d in batch], engine)
            writer.write_batch(_record_batch(batch, tokenised))
            n_documents += len(batch)
            n_tokens += sum(len(t.ids) for t in tokenised)
            n_supervised += sum(t.n_supervised for t in tokenised)
    return TokenShardRecord(
        source=shard.source,
        shard=shard.shard,
        path=str(output),
        sha256=sha256_file(output),
        n_documents=n_documents,
        n_tokens=n_tokens,
        n_supervised_tokens=n_supervised,
        engine=engine.name,
        engine_version=engine.version,
        tokenizer_sha256=engine.sha256,
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        yield batch


def _record_batch(documents: list[Document], tokenised: list[TokenisedDocument]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "row": [d.row for d in documents],
            "held_out": [d.held_out for d in documents],
            "ids": [t.ids for t in tokenised],
            "spans": [t.spans for t in tokenised],
        },
        schema=TOKENS,
    )
