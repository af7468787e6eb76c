"""The Arrow layout of documents, written and read in one place.

One row is one document. ``text_hash`` is equal for documents that count as one, ``group_hash`` for
documents that must stay on the same side of the train / held-out split. What a document says is
held in two parts, ``frame`` and ``texts``; see ``shapes``. ``fields`` is the JSON of what the
task's scorer needs. With near-duplicate detection there is a column ``signature`` besides: the
document's MinHash as little-endian uint32.

Two texts are equal when they differ only in blanks, line ends or the way Unicode composes letters.
The split's hash is salted: a data set may itself have been cut by a plain hash of the very same
key, and then its groups are not spread evenly any more.
"""

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from expertflow.core.records import Record
from expertflow.data.keep_list import Kept, read_keep
from expertflow.data.records import Body, ShardRecord
from expertflow.data.settings import SignatureSpec
from expertflow.data.shapes import body_of

HASH_BYTES = 16
SALT = b"held out: "
BATCH_DOCUMENTS = 2000
BATCH_BYTES = 4 << 20


def documents_schema(near: SignatureSpec | None) -> pa.Schema:
    """Give the layout of documents."""
    columns = [
        ("document_id", pa.string()),
        ("text_hash", pa.binary(HASH_BYTES)),
        ("group_hash", pa.uint64()),
        ("category", pa.string()),
        ("frame", pa.binary()),
        ("texts", pa.list_(pa.string())),
        ("fields", pa.binary()),
    ]
    if near is not None:
        columns.append(("signature", pa.binary(4 * near.n_permutations)))
    return pa.schema(columns)


class NewDocument(NamedTuple):
    """A document on its way into a shard, in the order of the columns."""

    document_id: str
    text_hash: bytes
    group_hash: int
    category: str | None
    frame: bytes
    texts: Sequence[str]
    fields: bytes
    signature: bytes | None = None


class DocumentWriter:
    """Write documents to an Arrow stream, in batches of flat memory."""

    def __init__(self, sink: pa.NativeFile, near: SignatureSpec | None) -> None:
        self.schema = documents_schema(near)
        # Texts shrink to a quarter, and writing them so takes less time than writing them whole.
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_stream(sink, self.schema, options=options)
        self._rows: list[NewDocument] = []
        self._n_bytes = 0

    def add(self, document: NewDocument) -> None:
        """Add one document."""
        self._rows.append(document)
        self._n_bytes += sum(map(len, document.texts))
        if len(self._rows) == BATCH_DOCUMENTS or self._n_bytes > BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the end of the stream."""
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        columns = [
            pa.array(values, column.type)
            for values, column in zip(zip(*self._rows, strict=True), self.schema, strict=False)
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self.schema))
        self._rows, self._n_bytes = [], 0


class Document(Record, frozen=True, kw_only=True):
    """A document with its side of the split. Training sees it ``n_copies`` times an epoch."""

    document_id: str
    text_hash: str
    body: Body
    fields: dict[str, Any]
    held_out: bool
    n_copies: int
    row: int


def iter_documents(shard: ShardRecord, keep: dict[int, Kept]) -> Iterator[Document]:
    """Yield the kept documents of a shard in their order."""
    first = 0
    with pa.memory_map(shard.path) as source:
        for batch in pa.ipc.open_stream(source):
            rows = [row for row in range(first, first + batch.num_rows) if row in keep]
            taken = batch.take(pa.array([row - first for row in rows], pa.int32()))
            for row, value in zip(rows, taken.to_pylist(), strict=True):
                yield Document(
                    document_id=value["document_id"],
                    text_hash=value["text_hash"].hex(),
                    body=body_of(value["frame"], value["texts"]),
                    fields=orjson.loads(value["fields"]),
                    held_out=keep[row].held_out,
                    n_copies=keep[row].n_copies,
                    row=row,
                )
            first += batch.num_rows


def iter_texts(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield ids, frames and texts of all documents of a shard, in their order."""
    columns = documents_schema(None).names
    chosen = [columns.index(name) for name in ("document_id", "frame", "texts")]
    options = pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
    with pa.memory_map(str(path)) as source:
        yield from pa.ipc.open_stream(source, options=options)


def iter_kept(shards: list[ShardRecord], keep: Path) -> Iterator[Document]:
    """Yield the kept documents of all shards, in the order of the manifest."""
    for shard in shards:
        yield from iter_documents(shard, read_keep(keep, shard))


def normalised(text: str) -> str:
    r"""Fold what makes no difference to a reader: every run of blanks is one, letters are composed.

    >>> normalised("a\r\n  b ")
    'a b'
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def hash_document(given: str, answer: str) -> tuple[int, bytes]:
    """Give the place of the group that ``given`` makes, and the hash of both texts together."""
    digest = hashlib.sha256(SALT + given.encode("utf-8", "surrogatepass"))
    place = int.from_bytes(digest.digest()[:8], "big")
    digest.update(b"\n" + answer.encode("utf-8", "surrogatepass"))
    return place, digest.digest()[:HASH_BYTES]


def text_hash(text: str) -> bytes:
    """Hash a text as it is, to 16 bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES]


def group_hash(group: str) -> int:
    """Give a group its place in [0, 2^64): a document whose place is low enough is held out."""
    digest = hashlib.sha256(SALT + group.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")
