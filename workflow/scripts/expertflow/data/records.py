"""Records of the data stages: locks, data sets, document shards, the split.

A *record* is one raw item of a source. A *document* is made from a record: a chat or a plain text.
Each document shard has a small JSON record with its hash, on which later stages depend.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import field

from expertflow.core.records import Record

# A raw record: any JSON object.
Fields = dict[str, Any]
FileFormat = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "arrow"]
Compression = Literal["gzip", "zstd"]


class LockedFile(Record, frozen=True, kw_only=True):
    path: str
    format: FileFormat
    compression: Compression | None
    n_bytes: int
    sha256: str


class SourceLock(Record, frozen=True, kw_only=True):
    """Pins a source's content. ``revision`` is null for an unresolved hub source."""

    name: str
    kind: str
    n_shards: int
    revision: str | None
    identity: dict[str, Any]
    files: tuple[LockedFile, ...]


class ExpertLock(Record, frozen=True, kw_only=True):
    expert: str
    sources: tuple[SourceLock, ...]


class DataFile(LockedFile, frozen=True, kw_only=True):
    """A file of raw records on this machine; ``notes`` list anything unusual about it.

    ``n_records`` is null if counting would need another full read. For uncompressed JSONL,
    ``n_newlines`` counts line ends per block.
    """

    n_records: int | None
    n_newlines: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class Artifact(Record, frozen=True, kw_only=True):
    path: str
    sha256: str


class SourceRecord(Record, frozen=True, kw_only=True):
    """A source with its records on this disk; ``artifacts`` are files for scoring.

    ``card_license`` is the card's; the manifest's is omitted, since it does not affect training.
    """

    name: str
    preset: str
    kind: str
    revision: str | None
    card_license: str | None
    n_shards: int
    files: tuple[DataFile, ...]
    artifacts: dict[str, Artifact]

    @property
    def files_outside(self) -> dict[Path, str]:
        """Hashes of the files that are read in place; checked wherever the source is used."""
        return {Path(file.path): file.sha256 for file in self.files}


class DatasetSource(Record, frozen=True, kw_only=True):
    name: str
    kind: str
    revision: str | None
    license: str | None
    n_files: int
    n_bytes: int
    n_records: int | None
    n_shards: int
    sha256: str
    notes: tuple[str, ...]


class DatasetManifest(Record, frozen=True, kw_only=True):
    expert: str
    preset: str
    sources: tuple[DatasetSource, ...]


class ToolCall(Record, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Turn(Record, frozen=True, kw_only=True):
    """A chat turn; the model is trained to write ``learned`` ones. ``name`` is a result's tool."""

    role: str
    content: str
    learned: bool
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Body(Record, frozen=True, kw_only=True):
    """A document's content: chat turns with available tools, or plain text."""

    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None


class Segment(NamedTuple):
    """A span of a rendered document that is tokenized as a unit.

    A ``special`` segment is one special token, inserted by id. ``learned`` are ordered character
    ranges [start, end) that the model learns to write.
    """

    text: str
    special: bool = False
    learned: tuple[tuple[int, int], ...] = ()


class Layout(Record, frozen=True, kw_only=True):
    """How a model writes chats and texts.

    ``chat_template`` is Jinja, or null. ``problem`` explains why it cannot render chats; plain
    texts still work. ``turn_end`` ends an assistant turn, ``text_end`` a plain text.
    ``added_tokens`` are not special: the tokenizer splits them out of any text. Special tokens in
    ``strip_after`` and ``strip_before`` swallow adjacent whitespace. ``text_special_tokens``:
    whether a special token's name inside a text is plain characters, a reason to reject, or the
    token.
    """

    chat_template: str | None
    chat_template_origin: Literal["tokenizer", "manifest", "chatml", "none"]
    problem: str | None = None
    special_tokens: tuple[str, ...]
    added_tokens: tuple[str, ...] = ()
    strip_after: tuple[str, ...] = ()
    strip_before: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None
    text_start: str | None = None
    text_end: str
    turn_end: str | None = None
    text_special_tokens: Literal["plain", "reject", "allow"] = "plain"


class ShardRecord(Record, frozen=True, kw_only=True):
    """A shard of documents.

    Rejected records have a data fault; filtered ones fail a check or contain a secret or benchmark.
    Noted ones are documents with an unusual form.
    """

    source: str
    shard: str
    path: str
    sha256: str
    n_records: int
    n_documents: int
    n_rejected_by_reason: dict[str, int]
    n_filtered_by_reason: dict[str, int]
    n_noted_by_reason: dict[str, int] = field(default_factory=dict)
    rejected_examples: tuple[str, ...]


class DuplicateExample(Record, frozen=True, kw_only=True):
    dropped: str
    kept: str
    reason: str
    similarity: float


class RecordCounts(Record, frozen=True, kw_only=True):
    """Outcomes of a set of records. ``n_train`` counts documents without repeats."""

    n_records: int
    n_rejected: int
    n_filtered: int
    n_dropped: int
    n_train: int
    n_held_out: int

    @property
    def n_documents(self) -> int:
        return self.n_train + self.n_held_out


class SourceCounts(RecordCounts, frozen=True, kw_only=True):
    source: str


class DocumentsRecord(RecordCounts, frozen=True, kw_only=True):
    """``sha256`` is the keep-list's; ``n_train_copies`` counts training documents with repeats."""

    expert: str
    sha256: str
    n_train_copies: int
    n_dropped_by_reason: dict[str, int]
    n_rejected_by_reason: dict[str, int]
    n_filtered_by_reason: dict[str, int]
    n_noted_by_reason: dict[str, int] = field(default_factory=dict)
    n_kept_by_category: dict[str, int]
    duplicate_examples: tuple[DuplicateExample, ...]
    sources: tuple[SourceCounts, ...]
