"""Read and write the Arrow files of documents and of the keep-list.

The keep-list lists kept documents by source, shard and row, with copies and split side. A document
shard has one row per document. ``text_hash`` is equal for duplicates, ``group_hash`` for documents
that must stay on the same side of the split. ``frame`` and ``texts`` are the body; see ``shapes``.
``fields`` is JSON for the scorer, ``signature`` a MinHash as little-endian uint32.

Texts count as equal if they differ only in whitespace, line ends or Unicode composition. The split
hash is salted: a data set may itself be cut by a plain hash of the same key, which would skew the
split.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.data.records import Body, Fields, ShardRecord
from expertflow.data.settings import SignatureSpec

HASH_BYTES = 16
SALT = b"held out: "
BATCH_DOCUMENTS = 2000
BATCH_BYTES = 4 << 20
KEEP = pa.schema({
    "source": pa.string(), "shard": pa.string(), "row": pa.int32(), "held_out": pa.bool_(),
    "n_copies": pa.int32(),
})  # fmt: skip


class NewDocument(NamedTuple):
    document_id: str
    text_hash: bytes
    group_hash: int
    category: str | None
    frame: bytes
    texts: Sequence[str]
    fields: bytes
    signature: bytes | None = None


class DocumentWriter:
    def __init__(self, sink: pa.NativeFile, near: SignatureSpec | None) -> None:
        text, raw = pa.string(), pa.binary()
        types = [text, pa.binary(HASH_BYTES), pa.uint64(), text, raw, pa.list_(text), raw]
        if near is not None:
            types.append(pa.binary(4 * near.n_permutations))
        self.schema = pa.schema(list(zip(NewDocument._fields, types, strict=False)))
        # Texts shrink to a quarter, and are written faster than uncompressed.
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_stream(sink, self.schema, options=options)
        self._rows: list[NewDocument] = []
        self._n_bytes = 0

    def add(self, document: NewDocument) -> None:
        self._rows.append(document)
        # In characters: close enough to bound a batch. Fields count beyond 512 KiB each, so that
        # together they do not reach 2 GiB, Arrow's limit.
        self._n_bytes += sum(map(len, document.texts)) + max(0, len(document.fields) - (1 << 19))
        if len(self._rows) == BATCH_DOCUMENTS or self._n_bytes > BATCH_BYTES:
            self._flush()

    def close(self) -> None:
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


_READ = ("document_id", "text_hash", "group_hash", "frame", "texts", "fields")


class Document(Record, frozen=True, kw_only=True):
    """A document with its split side; training sees it ``n_copies`` times per epoch."""

    document_id: str
    text_hash: str
    group: int
    body: Body
    fields: Fields
    held_out: bool
    n_copies: int
    row: int


class KeptRows(NamedTuple):
    rows: NDArray[np.int32]
    held_out: NDArray[np.bool_]
    n_copies: NDArray[np.int32]


def read_keep(path: Path) -> dict[tuple[str, str], KeptRows]:
    """Read the kept rows of each shard by (source, shard), in manifest order."""
    names = ("row", "held_out", "n_copies")
    parts: dict[tuple[str, str], list[KeptRows]] = {}
    with pa.memory_map(str(path)) as source:
        for batch in pa.ipc.open_stream(source):
            # Each batch belongs to one shard.
            if batch.num_rows:
                key = batch["source"][0].as_py(), batch["shard"][0].as_py()
                # Arrow packs booleans into bits, which numpy cannot view.
                columns = (batch[name].to_numpy(zero_copy_only=False) for name in names)
                parts.setdefault(key, []).append(KeptRows(*columns))
        return {key: join_rows(own) for key, own in parts.items()}


def join_rows(parts: Sequence[KeptRows]) -> KeptRows:
    return KeptRows(*map(np.concatenate, zip(*parts, strict=True)))


def iter_kept(
    shards: Sequence[ShardRecord], keep: Path, *, held_out: bool | None = None
) -> Iterator[Document]:
    by_name = {(shard.source, shard.shard): shard for shard in shards}
    for key, kept in read_keep(keep).items():
        if held_out is not None:
            side = kept.held_out == held_out
            kept = KeptRows(*(column[side] for column in kept))
        if key in by_name and len(kept.rows):
            yield from iter_documents(by_name[key], kept)


def make_ids_unique(documents: Iterable[Document]) -> list[Document]:
    """Return kept documents; ids that occur twice get the hash of the text as a suffix.

    Ids come from the data, or are a file's name and a number, and may repeat; kept texts do not.
    """
    documents = list(documents)
    counts = Counter(one.document_id for one in documents)
    return [
        one
        if counts[one.document_id] == 1
        else replace(one, document_id=f"{one.document_id}#{one.text_hash}")
        for one in documents
    ]


def iter_documents(shard: ShardRecord, kept: KeptRows) -> Iterator[Document]:
    # Lazy: the keep-list alone does not need it.
    import orjson

    from expertflow.data.shapes import body_of

    first = done = 0
    for batch in iter_batches(shard.path, _READ):
        # Kept rows ascend, so this batch's are contiguous.
        end = int(np.searchsorted(kept.rows, first + batch.num_rows))
        taken = batch.take(pa.array(kept.rows[done:end] - first, pa.int32()))
        for i, value in enumerate(taken.to_pylist(), start=done):
            yield Document(
                document_id=value["document_id"],
                text_hash=value["text_hash"].hex(),
                group=value["group_hash"],
                body=body_of(value["frame"], value["texts"]),
                fields=orjson.loads(value["fields"]),
                held_out=bool(kept.held_out[i]),
                n_copies=int(kept.n_copies[i]),
                row=int(kept.rows[i]),
            )
        first, done = first + batch.num_rows, end


def iter_batches(
    path: Path | str, columns: Sequence[str] = ("document_id", "frame", "texts")
) -> Iterator[pa.RecordBatch]:
    # By position in the schema, which is the order of NewDocument.
    chosen = [NewDocument._fields.index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
    with pa.memory_map(str(path)) as source:
        yield from pa.ipc.open_stream(source, options=options)


def normalize_text(text: str) -> str:
    r"""Collapse whitespace and compose letters (NFC).

    >>> normalize_text("a\r\n  b ")
    'a b'
    """
    # ASCII is composed already, and most texts are ASCII.
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def hash_document(given: str, answer: str) -> tuple[int, bytes]:
    """Return the position of the group that ``given`` forms, and the hash of both texts."""
    digest = hashlib.sha256(SALT + given.encode("utf-8", "surrogatepass"))
    place = int.from_bytes(digest.digest()[:8], "big")
    # One pass: the prompt's digest is extended to the digest of both.
    digest.update(b"\n" + answer.encode("utf-8", "surrogatepass"))
    return place, digest.digest()[:HASH_BYTES]


def text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES]


def group_hash(group: str) -> int:
    """Return a group's position in [0, 2^64); documents at low positions are held out."""
    return hash_document(group, "")[0]
