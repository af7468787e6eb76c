"""Tokenise the kept documents of one shard into an Arrow file."""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pyarrow as pa

from expertflow.core.files import replacing, sha256_file
from expertflow.data.documents import Document, iter_documents, read_keep
from expertflow.data.records import Layout, Segment, ShardRecord
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer
from expertflow.tokens.arrow import TOKENS
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import DecodedPiece, DecodedSample, TokenShardRecord
from expertflow.tokens.tokenise import TokenisedDocument, tokenise

log = logging.getLogger(__name__)
BATCH_DOCUMENTS = 1000
N_SAMPLES = N_EXAMPLES = 3
SAMPLE_TOKENS = 400


class ShardTokeniser:
    """Render and tokenise documents, and keep count of what happens to them."""

    def __init__(self, engine: Engine, layout: Layout) -> None:
        self.engine = engine
        self._renderer = Renderer(layout)
        self.dropped: Counter[str] = Counter()
        self.dropped_examples: list[str] = []
        self.n_dropped_held_out = self.n_different = self.n_special_text = 0
        self.n_documents = self.n_tokens = self.n_supervised = 0
        self.samples: list[DecodedSample] = []

    def batch(self, documents: list[Document]) -> pa.RecordBatch:
        """Tokenise some documents; those that cannot be rendered are left out and counted."""
        rendered: list[tuple[Document, tuple[Segment, ...]]] = []
        for document in documents:
            self.n_special_text += self._renderer.has_special_text(document.body)
            try:
                rendered.append((document, self._renderer.render(document.body)))
            except Reject as reject:
                self._drop(document, reject)
        self.n_different += len(rendered)
        tokenised = tokenise([segments for _, segments in rendered], self.engine)
        pairs = [(document, t) for (document, _), t in zip(rendered, tokenised, strict=True)]
        for document, tokens in pairs:
            if len(self.samples) < N_SAMPLES and not document.held_out:
                self.samples.append(sample(document.document_id, tokens, self.engine))
        return self._record_batch([p for p in pairs for _ in range(p[0].n_copies)])

    def _drop(self, document: Document, reject: Reject) -> None:
        self.dropped[reject.reason] += 1
        self.n_dropped_held_out += document.held_out
        said = f"{document.document_id}: {reject.reason} ({reject.detail})"
        log.warning("%s", said)
        if len(self.dropped_examples) < N_EXAMPLES:
            self.dropped_examples.append(said)

    def _record_batch(self, pairs: list[tuple[Document, TokenisedDocument]]) -> pa.RecordBatch:
        self.n_documents += len(pairs)
        self.n_tokens += sum(len(tokens.ids) for _, tokens in pairs)
        self.n_supervised += sum(tokens.n_supervised for _, tokens in pairs)
        return pa.RecordBatch.from_pydict(
            {
                "row": [document.row for document, _ in pairs],
                "held_out": [document.held_out for document, _ in pairs],
                "ids": [tokens.ids for _, tokens in pairs],
                "spans": [tokens.spans for _, tokens in pairs],
            },
            schema=TOKENS,
        )


def pretokenize_shard(
    *, shard: ShardRecord, keep: Path, tokenizer: Path, layout: Layout, output: Path
) -> TokenShardRecord:
    """Write ids and supervised spans of a shard's kept documents, in their order.

    A document that counts several times is written as often.
    """
    tokeniser = ShardTokeniser(Engine(tokenizer), layout)
    kept = iter_documents(shard, read_keep(keep, shard))
    with (
        replacing(output) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_stream(sink, TOKENS) as writer,
    ):
        for batch in _batches(kept):
            writer.write_batch(tokeniser.batch(batch))
    engine = tokeniser.engine
    return TokenShardRecord(
        source=shard.source,
        shard=shard.shard,
        path=str(output),
        sha256=sha256_file(output),
        n_documents=tokeniser.n_documents,
        n_tokens=tokeniser.n_tokens,
        n_supervised_tokens=tokeniser.n_supervised,
        n_different_documents=tokeniser.n_different,
        n_special_text_documents=tokeniser.n_special_text,
        n_dropped_held_out=tokeniser.n_dropped_held_out,
        n_dropped_by_reason=dict(sorted(tokeniser.dropped.items())),
        dropped_examples=tuple(tokeniser.dropped_examples),
        samples=tuple(tokeniser.samples),
        engine=engine.name,
        engine_version=engine.version,
        tokenizer_sha256=engine.sha256,
    )


def sample(document_id: str, tokens: TokenisedDocument, engine: Engine) -> DecodedSample:
    """Decode the start of a document, cut where learning starts or ends."""
    n = min(len(tokens.ids), SAMPLE_TOKENS)
    edges = [0, *(at for at in tokens.spans if at < n), n]
    inside = set(zip(tokens.spans[::2], tokens.spans[1::2], strict=True))
    pieces = [
        DecodedPiece(
            text=engine.decode(tokens.ids[start:end]),
            learned=any(low <= start < high for low, high in inside),
        )
        for start, end in pairwise(edges)
        if start < end
    ]
    return DecodedSample(
        document_id=document_id,
        n_tokens=len(tokens.ids),
        n_supervised_tokens=tokens.n_supervised,
        pieces=tuple(pieces),
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        yield batch
